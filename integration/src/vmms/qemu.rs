//! An unmodified QEMU, with functions of `nvme-mpt serve`.

use crate::guest::{BOOT_TIMEOUT, Guest, GuestAgent, GuestConfig, GuestDrive, HOTPLUG_BUS};
use crate::server::{self, Server, ServerReplacement};

use super::{
    MEMORY_MIB, POWER_OFF, REBOOT, RequestOutcome, RootLocation, TIMEOUT, VmmSetup, VmmUnderTest,
    VmmsError, expect_success, remove_controller_script,
};

/// QEMU and the server of its functions.
#[derive(Debug)]
pub struct QemuVmm {
    guest: Guest,
    server: Server,
    pluggable: String,
}

impl VmmUnderTest for QemuVmm {
    fn launch(setup: &VmmSetup<'_>) -> Result<Self, VmmsError> {
        let server = Server::start_supervised(&server::build()?, &setup.functions(), setup.dir)?;
        let config = GuestConfig::new("guest")
            .vcpus(setup.vcpus)
            .memory_mib(MEMORY_MIB)
            .hotplug()
            .reboots()
            .drive(GuestDrive::vfio_user(server.socket(&setup.first.id)))
            // Each character on the console costs an exit. So the kernel prints only warnings, such as those about late
            // commands.
            .kernel_arguments("loglevel=5");
        let config = match setup.root {
            RootLocation::Function => config.root_on_drive(),
            RootLocation::Memory => config,
        };
        Ok(Self {
            guest: Guest::boot(setup.assets, &config, setup.dir)?,
            server,
            pluggable: setup.pluggable.id.clone(),
        })
    }

    fn guest(&self) -> &GuestAgent {
        &self.guest
    }

    fn plug(&mut self) -> Result<(), VmmsError> {
        let drive = GuestDrive::vfio_user(self.server.socket(&self.pluggable));
        let drive = drive.id(&self.pluggable).bus(HOTPLUG_BUS);
        Ok(self.guest.plug(&drive)?)
    }

    fn unplug(&mut self, controller: &str) -> Result<RequestOutcome, VmmsError> {
        self.guest
            .check(&remove_controller_script(controller), TIMEOUT)?;
        Ok(RequestOutcome::Unsupported(
            "QEMU up to 11.1 aborts itself when a vfio-user function with MSI-X is taken out; only the guest \
             released it",
        ))
    }

    fn reboot(&mut self) -> Result<RequestOutcome, VmmsError> {
        // The script reboots the guest, so its own end cannot be observed.
        let _job = self.guest.start(REBOOT)?;
        self.guest.await_ready(BOOT_TIMEOUT)?;
        Ok(RequestOutcome::Done)
    }

    fn replace_server(&mut self, how: ServerReplacement) -> Result<RequestOutcome, VmmsError> {
        self.server.replace(how)?;
        Ok(RequestOutcome::Done)
    }

    fn power_off(&mut self) -> Result<(), VmmsError> {
        let status = self.guest.end(POWER_OFF, TIMEOUT)?;
        expect_success(status, &self.guest)?;
        Ok(self.server.stop()?)
    }
}
