//! Admin commands to a controller of the kernel's `nvme` driver. No command here changes the drive.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use nvme_spec::admin::{GetFeatures, IdentifyCommand};
use nvme_spec::feature::{FeatureId, NumberOfQueues};
use nvme_spec::identify::{Cns, IdentifyController, IdentifyNamespace, NsidList};
use nvme_spec::ids::Nsid;
use nvme_spec::log::{LogPageId, LogPageRequest, SmartHealth};
use nvme_spec::opcode::AdminOpcode;
use nvme_spec::sqe::Sqe;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::{HostRoot, KernelController};
use crate::description::DriveDescription;
use crate::ioctl;

/// Error of reading a drive's description through the kernel's driver.
#[derive(Debug, thiserror::Error)]
pub enum DescribeError {
    /// The controller's file cannot be opened.
    #[error(
        "Cannot open {}{}",
        path.display(),
        if source.kind() == io::ErrorKind::PermissionDenied { "; run as root" } else { "" }
    )]
    Open {
        /// Path of the file.
        path: PathBuf,
        /// Kernel's error.
        source: io::Error,
    },
    /// The drive failed a command.
    #[error("{} does not answer {command}", path.display())]
    Command {
        /// Path of the controller's file.
        path: PathBuf,
        /// Name of the command.
        command: &'static str,
        /// Kernel's error or the drive's status.
        source: io::Error,
    },
}

impl KernelController {
    /// Reads the drive's description.
    ///
    /// # Errors
    /// [`DescribeError`]. Optional data that the drive does not return is left out without an error.
    pub fn describe(&self, root: &HostRoot) -> Result<DriveDescription, DescribeError> {
        let path = root.dev.join(&self.name);
        let file = File::open(&path).map_err(|source| DescribeError::Open {
            path: path.clone(),
            source,
        })?;
        let failed = |command| {
            let path = path.clone();
            move |source| DescribeError::Command {
                path,
                command,
                source,
            }
        };
        let mut controller = IdentifyController::new_zeroed();
        identify(&file, Cns::CONTROLLER, Nsid(0), &mut controller)
            .map_err(failed("Identify Controller"))?;
        let mut list = NsidList::new_zeroed();
        identify(&file, Cns::ACTIVE_NSID_LIST, Nsid(0), &mut list)
            .map_err(failed("Identify Active Namespaces"))?;
        let mut namespaces = Vec::new();
        for nsid in list.0.into_iter().take_while(|nsid| nsid.0 != 0) {
            let mut namespace = IdentifyNamespace::new_zeroed();
            identify(&file, Cns::NAMESPACE, nsid, &mut namespace)
                .map_err(failed("Identify Namespace"))?;
            namespaces.push((nsid, namespace));
        }
        Ok(DriveDescription {
            controller,
            namespaces,
            health: read_health(&file).ok(),
            queue_pairs: read_queue_pairs(&file).ok(),
            // The kernel's driver creates this file if the drive has a Controller Memory Buffer.
            controller_memory: Some(
                root.sys
                    .join("class/nvme")
                    .join(&self.name)
                    .join("cmb")
                    .exists(),
            ),
            arbitration: None,
        })
    }
}

fn identify<T: FromBytes + IntoBytes>(
    file: &File,
    cns: Cns,
    nsid: Nsid,
    structure: &mut T,
) -> io::Result<()> {
    let mut sqe = Sqe::new(AdminOpcode::IDENTIFY.0);
    sqe.nsid = nsid;
    let command = IdentifyCommand {
        cns,
        ..IdentifyCommand::default()
    };
    command.write_to(&mut sqe);
    ioctl::nvme_admin(file, &sqe, structure.as_mut_bytes()).map(drop)
}

fn read_health(file: &File) -> io::Result<SmartHealth> {
    let mut page = SmartHealth::new_zeroed();
    let mut sqe = Sqe::new(AdminOpcode::GET_LOG_PAGE.0);
    sqe.nsid = Nsid::BROADCAST;
    let request = LogPageRequest {
        lid: LogPageId::SMART_HEALTH,
        // Retain Asynchronous Event is set: the event that announces the page stays raised for the kernel's driver.
        rae: true,
        numdl: (size_of::<SmartHealth>() / 4 - 1) as u16,
        ..LogPageRequest::default()
    };
    request.write_to(&mut sqe);
    ioctl::nvme_admin(file, &sqe, page.as_mut_bytes())?;
    Ok(page)
}

/// Reads the Number of Queues (Base 2.0, section 5.27.1.5) that the drive has granted to the kernel's driver.
fn read_queue_pairs(file: &File) -> io::Result<u16> {
    let mut sqe = Sqe::new(AdminOpcode::GET_FEATURES.0);
    let command = GetFeatures {
        fid: FeatureId::NUMBER_OF_QUEUES,
        ..GetFeatures::default()
    };
    command.write_to(&mut sqe);
    let granted = NumberOfQueues(ioctl::nvme_admin(file, &sqe, &mut [])?);
    Ok(granted.nsq_z().min(granted.ncq_z()).saturating_add(1))
}
