//! Consistency of the simulator's lists: each deliberate defect matches its source file, and each regression seed describes its
//! failure.

use std::fs;
use std::path::PathBuf;

#[test]
fn each_mutation_has_its_text_once() {
    let house = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let list = fs::read_to_string(house.join("tests/simulator/mutations.toml")).unwrap();
    let list: toml::Table = list.parse().unwrap();
    let mutations = list["mutation"].as_array().unwrap();
    assert!(!mutations.is_empty());
    for mutation in mutations {
        let text = |key: &str| mutation[key].as_str().unwrap();
        let name = text("name");
        let file = fs::read_to_string(house.join(text("file"))).unwrap();
        let count = file.matches(text("find").trim_end_matches('\n')).count();
        assert_eq!(count, 1, "{name}: write it anew");
    }
}

#[test]
fn each_seed_that_failed_once_names_its_scenario_and_its_fix() {
    let house = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let list = fs::read_to_string(house.join("tests/simulator/regressions.toml")).unwrap();
    let list: toml::Table = list.parse().unwrap();
    let regressions = list["regression"].as_array().unwrap();
    assert!(!regressions.is_empty());
    for regression in regressions {
        let seed = regression["seed"].as_integer().unwrap();
        assert!(seed >= 0, "{regression}");
        for key in ["scenario", "found", "fix", "test"] {
            assert!(!regression[key].as_str().unwrap().is_empty(), "{seed}");
        }
    }
}
