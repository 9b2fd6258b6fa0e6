//! A stock QEMU, with functions of `nvme-mpt serve`.

use crate::guest::{Agent, BOOT_PATIENCE, Drive, Guest, GuestConfig, HOTPLUG_BUS};
use crate::server::{self, Replacement, Server};

use super::{
    MEMORY_MIB, Outcome, PATIENCE, POWER_OFF, REBOOT, Root, Setup, Vmm, VmmsError, expect_success,
    forget,
};

/// QEMU and the server of its functions.
#[derive(Debug)]
pub struct Qemu {
    guest: Guest,
    server: Server,
    pluggable: String,
}

impl Vmm for Qemu {
    fn launch(setup: &Setup<'_>) -> Result<Self, VmmsError> {
        let server = Server::start_kept(&server::build()?, &setup.functions(), setup.folder)?;
        let config = GuestConfig::new("guest")
            .vcpus(setup.vcpus)
            .memory_mib(MEMORY_MIB)
            .hotplug()
            .reboots()
            .drive(Drive::vfio_user(server.socket(&setup.first.id)))
            // Each letter on the console costs an exit, so only warnings are printed, such as those about late commands.
            .kernel_arguments("loglevel=5");
        let config = match setup.root {
            Root::Function => config.root_on_drive(),
            Root::Memory => config,
        };
        Ok(Self {
            guest: Guest::boot(setup.assets, &config, setup.folder)?,
            server,
            pluggable: setup.pluggable.id.clone(),
        })
    }

    fn guest(&self) -> &Agent {
        &self.guest
    }

    fn plug(&mut self) -> Result<(), VmmsError> {
        let drive = Drive::vfio_user(self.server.socket(&self.pluggable));
        let drive = drive.id(&self.pluggable).bus(HOTPLUG_BUS);
        Ok(self.guest.plug(&drive)?)
    }

    fn unplug(&mut self, controller: &str) -> Result<Outcome, VmmsError> {
        self.guest.check(&forget(controller), PATIENCE)?;
        Ok(Outcome::Lacking(
            "QEMU up to 11.1 aborts itself when a vfio-user function with MSI-X is taken out; only the guest \
             released it",
        ))
    }

    fn reboot(&mut self) -> Result<Outcome, VmmsError> {
        // The script's end cannot be observed.
        let _job = self.guest.start(REBOOT)?;
        self.guest.await_ready(BOOT_PATIENCE)?;
        Ok(Outcome::Done)
    }

    fn replace_server(&mut self, how: Replacement) -> Result<Outcome, VmmsError> {
        self.server.replace(how)?;
        Ok(Outcome::Done)
    }

    fn power_off(&mut self) -> Result<(), VmmsError> {
        let status = self.guest.end(POWER_OFF, PATIENCE)?;
        expect_success(status, &self.guest)?;
        Ok(self.server.stop()?)
    }
}
