#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nvme_mpt_fuzz_targets::inflight_state::run(input));
