// SPDX-License-Identifier: Apache-2.0

//! Configuration of an NVMe function in the VMM's own process, on a part of a drive.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::result;

use nvme_mpt_vmm::options::{ByteSize, FunctionConfig, OptionError, config_help};
use nvme_mpt_vmm::report;
use option_parser::OptionParser;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Error, PciDeviceCommonConfig, Result, ValidationError, ValidationResult};
use crate::vm_config::VmConfig;

/// Options of a function: the keys of [`FunctionConfig`], with types.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct NvmeMptOptions {
    /// PCI address, file, block device, "memory:SIZE" or "null:SIZE"
    pub path: String,
    /// "START+LENGTH" in bytes
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserve: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mdts: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub doorbells: Option<String>,
    #[serde(rename = "doorbell-stride", skip_serializing_if = "Option::is_none")]
    pub doorbell_stride: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub poll: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fixed: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    #[serde(rename = "memory-limit", skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<u64>,
    /// "NUMBER" or "NUMBER+BURST" in commands per second
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<String>,
    /// "SIZE" or "SIZE+BURST" in bytes per second
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lba: Option<u64>,
    #[serde(rename = "drive-id", skip_serializing_if = "Option::is_none")]
    pub drive_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    #[cfg(feature = "nvme_mpt_models")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    #[cfg(feature = "nvme_mpt_models")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub faults: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub populate: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<u32>,
    /// Seconds
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arbitration: Option<String>,
    /// Seconds
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reconnect: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_dir: Option<PathBuf>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "NvmeMptKeys")]
pub struct NvmeMptConfig {
    #[serde(flatten)]
    pub pci_common: PciDeviceCommonConfig,
    #[serde(flatten)]
    pub options: NvmeMptOptions,
}

/// Keys in JSON. `deny_unknown_fields` does not work with `flatten`, so unknown keys are collected
/// to be refused.
#[derive(Deserialize)]
struct NvmeMptKeys {
    #[serde(flatten)]
    pci_common: PciDeviceCommonConfig,
    #[serde(flatten)]
    options: NvmeMptOptions,
    #[serde(flatten)]
    unknown: BTreeMap<String, IgnoredAny>,
}

impl TryFrom<NvmeMptKeys> for NvmeMptConfig {
    type Error = String;

    fn try_from(keys: NvmeMptKeys) -> result::Result<Self, String> {
        let known = FunctionConfig::KEYS;
        let is_unknown = |key: &&String| !known.contains(&key.as_str());
        if let Some(key) = keys.unknown.keys().find(is_unknown) {
            let known = known.join(", ");
            return Err(format!(
                "An NVMe function has no option \"{key}\", but these: {known}"
            ));
        }
        Ok(NvmeMptConfig {
            pci_common: keys.pci_common,
            options: keys.options,
        })
    }
}

/// Options that take a number of bytes: "128K" on the command line, 131072 in JSON.
const SIZES: [&str; 5] = ["size", "unit", "mdts", "memory-limit", "lba"];

fn message(error: &OptionError) -> String {
    report::chain(error).replace("\n  ", ": ")
}

impl NvmeMptConfig {
    pub const SYNTAX: &'static str = "NVMe function parameters \
        \"path=<pci_address_or_file_or_block_device_or_memory:size_or_null:size>,\
        range=<start>+<length>,size=<size>,lease=<lease_id>,queues=<number_of_queue_pairs>,\
        iops=<number>+<burst>,bandwidth=<size>+<burst>,weight=<1_to_1000>,\
        serial=<serial_number>,state_dir=<lease_directory>,id=<device_id>,\
        pci_segment=<segment_id>,pci_device_id=<pci_slot>\"; \"help\" prints all parameters";

    /// Returns the help of all options of this build.
    pub fn help() -> String {
        config_help()
    }

    pub fn parse(nvme_mpt: &str) -> Result<Self> {
        let mut parser = OptionParser::new();
        parser
            .add_all(FunctionConfig::KEYS)
            .add_all(PciDeviceCommonConfig::OPTIONS);
        parser.parse(nvme_mpt).map_err(Error::ParseNvmeMpt)?;

        let check = || -> result::Result<FunctionConfig, OptionError> {
            let function = FunctionConfig::from_keys(|key| parser.get(key))?;
            function.options()?;
            Ok(function)
        };
        let function = check().map_err(|e| Error::InvalidNvmeMpt(message(&e)))?;
        let mut values = serde_json::to_value(&function).unwrap_or_default();
        for key in SIZES {
            let size = values.get(key).and_then(Value::as_str);
            if let Some(size) = size.and_then(|size| size.parse::<ByteSize>().ok()) {
                values[key] = size.0.into();
            }
        }
        let mut options: NvmeMptOptions =
            serde_json::from_value(values).map_err(|e| Error::InvalidNvmeMpt(e.to_string()))?;
        options.state_dir = parser.get("state_dir").map(PathBuf::from);

        Ok(NvmeMptConfig {
            pci_common: PciDeviceCommonConfig::parse(nvme_mpt)?,
            options,
        })
    }

    /// Returns the configuration as the crate takes it that makes functions.
    pub fn function_config(&self) -> result::Result<FunctionConfig, OptionError> {
        // A structure of texts and numbers has a JSON value.
        let options = serde_json::to_value(&self.options).unwrap_or_default();
        FunctionConfig::from_keys(|key| match options.get(key)? {
            Value::String(text) if key == "path" && text.is_empty() => None,
            Value::String(text) => Some(text.clone()),
            value => Some(value.to_string()),
        })
    }

    pub fn validate(&self, vm_config: &VmConfig) -> ValidationResult<()> {
        if self.pci_common.iommu {
            return Err(ValidationError::IommuNotSupported);
        }

        let options = self
            .function_config()
            .and_then(|config| config.options())
            .map_err(|e| ValidationError::InvalidNvmeMpt(message(&e)))?;

        // The drive would go on with pages that the balloon has freed.
        if options.pins_memory() && vm_config.balloon.is_some() {
            return Err(ValidationError::InvalidNvmeMpt(format!(
                "Drive {} has the guest's memory pinned, so the VM cannot have a --balloon",
                options.path
            )));
        }

        self.pci_common.validate(vm_config)
    }
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    fn read(json: &str) -> serde_json::Result<NvmeMptConfig> {
        serde_json::from_str(json)
    }

    #[test]
    fn test_nvme_mpt_parsing() {
        let config = NvmeMptConfig::parse(
            "path=/srv/a.img,range=1G+8M,mdts=128K,iops=1000+50,drive-id=a,id=b,pci_device_id=5",
        )
        .unwrap();
        assert_eq!(
            config,
            NvmeMptConfig {
                pci_common: PciDeviceCommonConfig {
                    id: Some("b".to_owned()),
                    pci_device_id: Some(5),
                    ..Default::default()
                },
                options: NvmeMptOptions {
                    path: "/srv/a.img".to_owned(),
                    range: Some("1G+8M".to_owned()),
                    mdts: Some(128 << 10),
                    iops: Some("1000+50".to_owned()),
                    drive_id: Some("a".to_owned()),
                    ..Default::default()
                },
            }
        );
        NvmeMptConfig::parse("path=null:1G,rang=0+8M").unwrap_err();
        // An error names the option, its value and what to do.
        for (options, named) in [
            ("path=null:1T,queues=100000", "\"queues\" cannot be \"100000\""),
            ("path=null:1T,size=1X", "\"size\" cannot be \"1X\""),
            ("path=null:1T,lba=520", "\"lba\" cannot be \"520\""),
            ("path=null:1T,weight=0", "\"weight\" cannot be \"0\""),
            ("path=null:1T,timeout=1", "timeout"),
            ("size=1G", "\"path\" is missing"),
        ] {
            let error = NvmeMptConfig::parse(options).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn test_nvme_mpt_json() {
        let config =
            read(r#"{"path":"null:1G","range":"0+8M","id":"a","pci_segment":1}"#).unwrap();
        assert_eq!(config.pci_common.id.as_deref(), Some("a"));
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(read(&text).unwrap(), config);

        let error = read(r#"{"path":"null:1G","rang":"0+8M"}"#).unwrap_err();
        assert!(error.to_string().contains("\"rang\""), "{error}");
        assert!(error.to_string().contains("range"), "{error}");
    }

    /// Each option of a function has a field, which reaches the function.
    #[test]
    fn test_nvme_mpt_options() {
        let numbers = [
            "size",
            "unit",
            "queues",
            "reserve",
            "mdts",
            "doorbell-stride",
            "memory-limit",
            "weight",
            "lba",
            "namespace",
            "timeout",
            "reconnect",
        ];
        for key in FunctionConfig::KEYS {
            let value = if numbers.contains(key) { "512" } else { "\"x\"" };
            let json = match *key {
                "path" => r#"{"path":"x"}"#.to_owned(),
                _ => format!(r#"{{"path":"x","{key}":{value}}}"#),
            };
            let config = read(&json).unwrap();
            let function = serde_json::to_string(&config.function_config().unwrap()).unwrap();
            assert!(function.contains(&format!("\"{key}\":")), "{function}");
            assert!(NvmeMptConfig::help().contains(&format!("  {key} ")), "{key}");
        }
    }

    #[test]
    fn test_nvme_mpt_balloon() {
        let json = r#"{
            "payload": {"kernel": "/kernel"},
            "memory": {"size": 1073741824, "shared": true},
            "nvme_mpt": [{"path": "0000:01:00.0", "range": "0+8M"}],
            "balloon": {"size": 0, "free_page_reporting": true}
        }"#;
        let mut config: VmConfig = serde_json::from_str(json).unwrap();
        let error = config.validate().unwrap_err();
        assert!(error.to_string().contains("--balloon"), "{error}");
        config.balloon = None;
        config.validate().unwrap();
        // A file's blocks are copied, and nothing is pinned.
        let json = json.replace("0000:01:00.0", "null:1G");
        let mut config: VmConfig = serde_json::from_str(&json).unwrap();
        config.validate().unwrap();
    }

    #[test]
    fn test_nvme_mpt_validation() {
        let mut config: VmConfig = serde_json::from_str(
            r#"{"payload": {"kernel": "/kernel"}, "memory": {"size": 1073741824}}"#,
        )
        .unwrap();
        config.nvme_mpt = Some(vec![NvmeMptConfig::parse("path=null:1G").unwrap()]);
        assert_eq!(
            config.validate(),
            Err(ValidationError::NvmeMptRequiresSharedMemory)
        );
        config.memory.shared = true;
        config.validate().unwrap();
        // The API's values are checked as those of the command line.
        for (json, named) in [
            (r#"{"path":"null:1G","lba":520}"#, "\"lba\" cannot be \"520\""),
            (r#"{"path":"null:1G","weight":0}"#, "\"weight\" cannot be \"0\""),
            (r#"{"path":""}"#, "\"path\" is missing"),
        ] {
            config.nvme_mpt = Some(vec![read(json).unwrap()]);
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
