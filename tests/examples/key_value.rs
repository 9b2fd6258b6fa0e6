//! Stores and reads values on a drive of keys and values, through a guest driver in this process.
//!
//! ```text
//! truncate -s 1G /var/tmp/pairs.img
//! nvme-mpt serve --function socket=/run/kv.sock,path=/var/tmp/pairs.img,profile=kv &
//! cargo run -p nvme-mpt-tests --example key_value -- /run/kv.sock store colour blue
//! cargo run -p nvme-mpt-tests --example key_value -- /run/kv.sock retrieve colour
//! cargo run -p nvme-mpt-tests --example key_value -- /run/kv.sock list
//! cargo run -p nvme-mpt-tests --example key_value -- /run/kv.sock delete colour
//! ```
//!
//! The socket belongs to `nvme-mpt serve`, and must have no other client at the same time.

use std::error::Error;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::key_value::KeyValues;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::registers::CC_CSS_ALL;
use nvme_mpt_tests::vfio_user::VfioUserBar;

const USAGE: &str = "key_value SOCKET store KEY VALUE | retrieve KEY | delete KEY | list [FROM]";

/// Start and size of this guest's memory, for queues and for values of up to 1 MiB.
const MEMORY: (u64, u64) = (1 << 32, 8 << 20);

/// Buffer size of a list in bytes. A longer list is continued from its last key.
const LIST: usize = 4096;

/// Longest key, in bytes.
const KEY: usize = 16;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let [socket, command @ ..] = arguments.as_slice() else {
        return Err(USAGE.into());
    };
    if let Some(key) = command.get(1).filter(|key| key.len() > KEY) {
        return Err(format!("Key {key} has more than {KEY} bytes: choose a shorter one").into());
    }
    let (mut controller, mut pairs) = connect(Path::new(socket))?;
    match *command {
        ["store", key, value] => pairs.store(key.as_bytes(), value.as_bytes())?,
        ["retrieve", key] => {
            // Retrieve the size first, then the value.
            let (_, size) = pairs.retrieve(key.as_bytes(), 0)?;
            let (value, _) = pairs.retrieve(key.as_bytes(), size as usize)?;
            io::stdout().write_all(&value)?;
            println!();
        }
        ["delete", key] => pairs.delete(key.as_bytes())?,
        ["list"] => list(&mut pairs, b"")?,
        ["list", from] => list(&mut pairs, from.as_bytes())?,
        _ => return Err(USAGE.into()),
    }
    let namespace = KeyValues::namespace(&mut controller, pairs.nsid())?;
    eprintln!("{} of {} bytes in use", namespace.used, namespace.size);
    controller.disable()?;
    Ok(())
}

/// Connects to a function, enables its controller with all its command sets, and opens namespace 1.
fn connect(socket: &Path) -> Result<(Controller, KeyValues)> {
    let memory = GuestMemory::new(&[MEMORY])?;
    let bar = Arc::new(VfioUserBar::attach(socket, &memory)?);
    let config = Config {
        command_set: CC_CSS_ALL,
        ..Config::default()
    };
    let mut controller = Controller::attach(bar, memory, config, 1)?;
    let pairs = KeyValues::open(&mut controller, 1)?;
    Ok((controller, pairs))
}

/// Prints all keys, starting at `from`.
fn list(pairs: &mut KeyValues, from: &[u8]) -> Result<()> {
    let mut from = from.to_vec();
    let mut skip = 0;
    loop {
        let keys = pairs.list(&from, LIST)?;
        for key in keys.iter().skip(skip) {
            println!("{}", key.escape_ascii());
        }
        // A list starts with the given key, which was printed already.
        match keys.last() {
            Some(last) if keys.len() > skip => from = last.clone(),
            _ => return Ok(()),
        }
        skip = 1;
    }
}
