//! Pauses several functions together, so that another process can take them over.
//!
//! Drives differ in speed, and a drive may hang. The guests of other drives must not notice a pause because of a slow drive.

use std::time::Duration;

/// Maximum time for pausing several functions together. A function that quiesces fast is paused at most this long while others
/// still quiesce.
const PAUSE_TIMEOUT: Duration = Duration::from_millis(100);

/// Maximum time for pausing a function of a slow drive, while functions of other drives run.
const SLOW_PAUSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Pauses all functions at the same time. `ask` gets the indices of functions to pause and a timeout, and returns a value for
/// each paused function. A function stays paused until its value is dropped.
///
/// A function whose drive is slow or does not answer must not keep the functions of other drives paused for more than 100 ms.
/// So a function that misses this timeout is first paused alone, while all other functions run. All functions are paused
/// together only after each slow function has been paused alone.
///
/// # Errors
/// Returns the index of a function that cannot be paused, with the reason.
pub fn pause_all<R>(
    count: usize,
    mut ask: impl FnMut(&[usize], Duration) -> Vec<Result<R, String>>,
) -> Result<Vec<R>, (usize, String)> {
    let places: Vec<usize> = (0..count).collect();
    let mut slow = Vec::new();
    let mut others = Vec::new();
    let mut quiesced = Vec::new();
    for (place, result) in places.iter().zip(ask(&places, PAUSE_TIMEOUT)) {
        match result {
            Ok(one) => {
                others.push(*place);
                quiesced.push(one);
            }
            Err(_) => slow.push(*place),
        }
    }
    if slow.is_empty() {
        return Ok(quiesced);
    }
    // All functions run again. If a slow function cannot be paused even alone, the attempt fails.
    drop(quiesced);
    for place in &slow {
        drop(pause_some(&[*place], SLOW_PAUSE_TIMEOUT, &mut ask)?);
    }
    let mut quiesced = pause_some(&slow, SLOW_PAUSE_TIMEOUT, &mut ask)?;
    quiesced.extend(pause_some(&others, PAUSE_TIMEOUT, &mut ask)?);
    Ok(quiesced)
}

/// Pauses the functions at the given indices. If one of them cannot be paused, returns its index and the reason, and the others
/// resume.
fn pause_some<R>(
    places: &[usize],
    time: Duration,
    ask: &mut impl FnMut(&[usize], Duration) -> Vec<Result<R, String>>,
) -> Result<Vec<R>, (usize, String)> {
    let results = places.iter().zip(ask(places, time));
    results
        .map(|(place, result)| result.map_err(|reason| (*place, reason)))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use super::*;

    /// Functions on a simulated clock. Each has the time that it needs to quiesce; `None` stands for a drive that never
    /// answers.
    struct SimulatedFunctions {
        now: Cell<Duration>,
        quiesce_times: Vec<Option<Duration>>,
        /// Time at which each function began to quiesce.
        quiescing_since: RefCell<Vec<Option<Duration>>>,
        longest_pauses: RefCell<Vec<Duration>>,
    }

    impl SimulatedFunctions {
        fn new(times: &[Option<u64>]) -> Rc<Self> {
            Rc::new(Self {
                now: Cell::default(),
                quiesce_times: times
                    .iter()
                    .map(|need| need.map(Duration::from_millis))
                    .collect(),
                quiescing_since: RefCell::new(vec![None; times.len()]),
                longest_pauses: RefCell::new(vec![Duration::ZERO; times.len()]),
            })
        }

        fn quiesce(
            self: &Rc<Self>,
            places: &[usize],
            time: Duration,
        ) -> Vec<Result<QuiescedFunction, String>> {
            let begun = self.now.get();
            let longest = places
                .iter()
                .map(|place| self.quiesce_times[*place].unwrap_or(time).min(time));
            self.now.set(begun + longest.max().unwrap_or_default());
            let quiesce_one = |place: &usize| {
                self.quiescing_since.borrow_mut()[*place] = Some(begun);
                let quiesced = QuiescedFunction(self.clone(), *place);
                let is_in_time = self.quiesce_times[*place].is_some_and(|need| need <= time);
                is_in_time
                    .then_some(quiesced)
                    .ok_or_else(|| "late".to_owned())
            };
            places.iter().map(quiesce_one).collect()
        }

        /// Quiesces all functions. Returns the result, and the longest pause of each function in milliseconds.
        fn quiesce_all(self: &Rc<Self>) -> (Result<Vec<usize>, usize>, Vec<u128>) {
            let result = pause_all(self.quiesce_times.len(), |places, time| {
                self.quiesce(places, time)
            });
            let result = result
                .map(|quiesced| quiesced.iter().map(|function| function.1).collect())
                .map_err(|(place, _)| place);
            let stood = self.longest_pauses.borrow();
            (result, stood.iter().map(Duration::as_millis).collect())
        }
    }

    struct QuiescedFunction(Rc<SimulatedFunctions>, usize);

    impl Drop for QuiescedFunction {
        fn drop(&mut self) {
            let Self(world, place) = self;
            if let Some(since) = world.quiescing_since.borrow_mut()[*place].take() {
                let stood = &mut world.longest_pauses.borrow_mut()[*place];
                *stood = (*stood).max(world.now.get() - since);
            }
        }
    }

    #[test]
    fn a_hanging_drive_refuses_an_upgrade_without_long_pauses_of_others() {
        let (result, stood) =
            SimulatedFunctions::new(&[Some(1), None, Some(40), Some(0)]).quiesce_all();
        assert_eq!(result, Err(1));
        assert!(
            [0, 2, 3].iter().all(|place| stood[*place] <= 100),
            "{stood:?}"
        );
        // A slow drive pauses only its own function while another drive does not answer.
        let (result, stood) = SimulatedFunctions::new(&[Some(2500), None, Some(0)]).quiesce_all();
        assert_eq!(result, Err(1));
        assert_eq!(stood[0], 2500);
        assert!(stood[2] <= 100, "{stood:?}");
    }

    #[test]
    fn slow_drives_quiesce_before_others() {
        let (result, stood) =
            SimulatedFunctions::new(&[Some(3), Some(2500), Some(1), Some(700)]).quiesce_all();
        let mut quiesced = result.unwrap();
        quiesced.sort_unstable();
        assert_eq!(quiesced, [0, 1, 2, 3]);
        assert!([0, 2].iter().all(|place| stood[*place] <= 100), "{stood:?}");
        let (result, stood) = SimulatedFunctions::new(&[Some(3), Some(2)]).quiesce_all();
        assert_eq!(result, Ok(vec![0, 1]));
        assert!(stood.iter().all(|stood| *stood <= 3), "{stood:?}");
    }
}
