// SPDX-License-Identifier: Apache-2.0

//! Refusal to snapshot or migrate VMs with vfio-user devices.
//!
//! The state of a vfio-user device is in its server, and the vfio-user client
//! cannot read it.

use std::result;

use thiserror::Error;

use crate::device_manager::PciDeviceHandle;
use crate::device_tree::DeviceTree;
use crate::vm_config::VmConfig;

#[derive(Debug, Error, PartialEq, Eq)]
pub(crate) enum UserDeviceError {
    #[error(
        "vfio-user devices can be neither snapshotted nor migrated, remove them first: {}",
        .0.join(", ")
    )]
    CannotSave(Vec<String>),

    #[error("VM was saved with vfio-user devices, which cannot be restored: {}", .0.join(", "))]
    CannotRestore(Vec<String>),
}

/// Checks that a VM has no vfio-user device. One that is being removed counts
/// until the guest has released it.
pub(crate) fn check_device_tree(device_tree: &DeviceTree) -> result::Result<(), UserDeviceError> {
    let mut ids: Vec<_> = device_tree
        .pci_devices()
        .into_iter()
        .filter(|node| matches!(node.pci_device_handle, Some(PciDeviceHandle::VfioUser(_))))
        .map(|node| node.id.clone())
        .collect();
    ids.sort();

    match ids.is_empty() {
        true => Ok(()),
        false => Err(UserDeviceError::CannotSave(ids)),
    }
}

/// Checks that the configuration of a saved VM has no vfio-user device.
pub(crate) fn check_saved_config(config: &VmConfig) -> result::Result<(), UserDeviceError> {
    let devices = config.user_devices.as_deref().unwrap_or_default();
    let ids: Vec<_> = devices
        .iter()
        .map(|device| match &device.pci_common.id {
            Some(id) => id.clone(),
            None => device.socket.display().to_string(),
        })
        .collect();

    match ids.is_empty() {
        true => Ok(()),
        false => Err(UserDeviceError::CannotRestore(ids)),
    }
}

#[cfg(test)]
mod unit_tests {
    use serde_json::json;

    use super::*;

    fn config(user_devices: &serde_json::Value) -> VmConfig {
        serde_json::from_value(json!({
            "payload": { "kernel": "/path/to/kernel" },
            "user_devices": user_devices,
        }))
        .unwrap()
    }

    #[test]
    fn test_saved_config_without_user_devices() {
        assert_eq!(check_saved_config(&config(&json!(null))), Ok(()));
        assert_eq!(check_saved_config(&config(&json!([]))), Ok(()));
    }

    #[test]
    fn test_saved_config_names_all_user_devices() {
        let devices = json!([
            { "socket": "/path/to/a", "id": "data" },
            { "socket": "/path/to/b" },
        ]);
        let error = check_saved_config(&config(&devices)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "VM was saved with vfio-user devices, which cannot be restored: data, /path/to/b"
        );
    }

    #[test]
    fn test_device_tree_without_user_devices() {
        assert_eq!(check_device_tree(&DeviceTree::new()), Ok(()));
    }
}
