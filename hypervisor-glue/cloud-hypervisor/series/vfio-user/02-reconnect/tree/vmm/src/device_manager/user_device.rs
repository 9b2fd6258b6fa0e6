// SPDX-License-Identifier: Apache-2.0

//! Threads that connect vfio-user devices again after their servers have gone.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;

use log::error;
use pci::VfioUserPciDevice;
use seccompiler::apply_filter;

use super::{DeviceManager, DeviceManagerError, DeviceManagerResult};
use crate::seccomp_filters::{Thread, get_seccomp_filter};

impl DeviceManager {
    /// Starts the thread of a device. It ends within a second after the device
    /// is removed.
    pub(super) fn keep_vfio_user_connected(
        &self,
        id: &str,
        socket: PathBuf,
        device: &Arc<Mutex<VfioUserPciDevice>>,
    ) -> DeviceManagerResult<()> {
        let seccomp_filter =
            get_seccomp_filter(&self.seccomp_action, Thread::VfioUserReconnect, None)
                .map_err(DeviceManagerError::VfioUserSeccompFilter)?;
        let device = Arc::downgrade(device);
        let id = id.to_owned();

        thread::Builder::new()
            .name(format!("{id}_reconnect"))
            .spawn(move || {
                if !seccomp_filter.is_empty()
                    && let Err(e) = apply_filter(&seccomp_filter)
                {
                    error!("Error applying seccomp filter: {e:?}");
                    return;
                }
                let run = || VfioUserPciDevice::keep_connected(&device, &socket);
                if catch_unwind(AssertUnwindSafe(run)).is_err() {
                    error!("The thread that reconnects vfio-user device {id} has panicked");
                }
            })
            .map(drop)
            .map_err(DeviceManagerError::VfioUserSpawnThread)
    }
}
