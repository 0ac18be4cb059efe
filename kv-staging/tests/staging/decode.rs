//! Time until use by tokens.

use kv_staging::{ClaimId, DecodeOptions, DecodeProjection, Outputs, TimeToUse, Work};
use proptest::{collection::vec, prelude::*};

const MS: u64 = 1_000_000;
const WORK: Work = Work { retrieval_ns: 20 * MS, prefill_ns: 5 * MS, tokens_max: None };

/// Iterations of 10 ms and 1 ms for each request, outputs of `lengths`.
fn trained(
    slots: usize,
    lengths: &[u64],
    change: impl FnOnce(&mut DecodeOptions),
) -> DecodeProjection {
    let mut options = DecodeOptions::new(slots, 10 * MS, MS);
    change(&mut options);
    let mut uses = DecodeProjection::new(options);
    lengths.iter().for_each(|tokens| uses.learn(*tokens));
    uses
}

/// Requests `0..running` decode and have written `written`; `running..all` wait.
fn serve(uses: &mut DecodeProjection, running: u64, all: u64, written: u64) {
    (0..all).for_each(|id| uses.enqueue(ClaimId(id), WORK));
    for id in 0..running {
        uses.start(ClaimId(id), 0);
        uses.progress(ClaimId(id), written, 0);
    }
}

#[test]
fn a_free_slot_means_now_and_an_unknown_request_means_nothing() {
    let mut uses = trained(2, &[100], |_| ());
    serve(&mut uses, 1, 2, 10);
    assert_eq!(uses.time_to_use_ns(ClaimId(1), 0), Some(0));
    assert_eq!(uses.time_to_use_ns(ClaimId(0), 0), Some(0));
    assert_eq!(uses.time_to_use_ns(ClaimId(9), 0), None);
    assert_eq!(uses.use_chance_permille(ClaimId(9), 1, 0), None);
}

#[test]
fn a_slot_is_free_when_its_tokens_are_written_at_the_batch_s_pace() {
    let mut uses = trained(2, &[100], |_| ());
    serve(&mut uses, 2, 3, 40);
    // 60 tokens in iterations of 12 ms.
    assert_eq!(uses.time_to_use_ns(ClaimId(2), 0), Some(60 * 12 * MS));
    // Time goes on without news, and news replace it.
    assert_eq!(uses.time_to_use_ns(ClaimId(2), 20 * MS), Some((60 * 12 - 20) * MS));
    uses.progress(ClaimId(0), 90, 30 * MS);
    assert_eq!(uses.time_to_use_ns(ClaimId(2), 30 * MS), Some(10 * 12 * MS));
}

#[test]
fn no_output_is_longer_than_it_may_be_and_the_first_ones_are_as_long() {
    let until = |lengths: &[u64], written| {
        let mut uses = trained(1, lengths, |_| ());
        let work = Work { tokens_max: Some(50), ..WORK };
        (0..2).for_each(|id| uses.enqueue(ClaimId(id), work));
        uses.start(ClaimId(0), 0);
        uses.progress(ClaimId(0), written, 0);
        uses.time_to_use_ns(ClaimId(1), 0)
    };
    assert_eq!(until(&[], 20), Some(30 * 11 * MS));
    assert_eq!(until(&[100], 20), Some(30 * 11 * MS));
    assert_eq!(until(&[40], 20), Some(20 * 11 * MS));
    assert_eq!(until(&[100], 60), Some(0));
}

#[test]
fn a_prefill_interrupts_the_others() {
    let mut uses = trained(2, &[100], |_| ());
    (0..3).for_each(|id| uses.enqueue(ClaimId(id), WORK));
    uses.start(ClaimId(0), 0);
    uses.progress(ClaimId(0), 0, 0);
    uses.start(ClaimId(1), 0);
    // It decodes alone for 20 ms at 11 ms a token, stands for the prefill of 5 ms, and goes on at 12 ms a token.
    let tokens_left = 100.0 - 20.0 / 11.0;
    let expected_ms = 25.0 + tokens_left * 12.0;
    let ms = uses.time_to_use_ns(ClaimId(2), 0).unwrap() as f64 / 1e6;
    assert!((ms - expected_ms).abs() < 0.01, "{ms} against {expected_ms}");
}

#[test]
fn the_first_of_many_is_sooner_than_the_mean_of_one() {
    let lengths: Vec<u64> = (1..=200).collect();
    let ask = |slots: u64, outputs| {
        let mut uses = trained(usize::try_from(slots).unwrap(), &lengths, |options| {
            (options.outputs, options.quantile_percent) = (outputs, 50);
            (options.iteration_ns, options.iteration_ns_per_request) = (10 * MS, 0);
        });
        serve(&mut uses, slots, slots + 1, 0);
        uses.time_to_use_ns(ClaimId(slots), 0).unwrap() / (10 * MS)
    };
    assert_eq!(ask(8, Outputs::Mean), 100);
    let one = ask(1, Outputs::Drawn);
    assert!((98..=103).contains(&one), "{one}");
    // The median of the least of 8 from 1 to 200 is 200 (1 - 0.5^(1/8)) = 16.6.
    let least = ask(8, Outputs::Drawn);
    assert!((8..=26).contains(&least), "{least}");
}

#[test]
fn the_chance_of_use_is_the_part_of_the_scenarios_until_then() {
    let lengths: Vec<u64> = (1..=100).collect();
    let mut uses = trained(1, &lengths, |options| options.iteration_ns_per_request = 0);
    serve(&mut uses, 1, 2, 50);
    let chance = |tokens: u64| uses.use_chance_permille(ClaimId(1), tokens * 10 * MS, 0).unwrap();
    assert_eq!((chance(0), chance(50)), (0, 1000));
    // Half of those that are longer than 50 end within 25 more.
    assert!((470..=530).contains(&chance(25)), "{}", chance(25));
    assert_eq!(uses.use_chance_permille(ClaimId(0), 0, 0), Some(1000));
}

#[test]
fn whoever_is_gone_frees_its_place() {
    let mut uses = trained(1, &[100], |_| ());
    serve(&mut uses, 1, 3, 0);
    let before = uses.time_to_use_ns(ClaimId(2), 0).unwrap();
    uses.remove(ClaimId(1));
    let after = uses.time_to_use_ns(ClaimId(2), 0).unwrap();
    assert!(after < before && uses.time_to_use_ns(ClaimId(1), 0).is_none());
    uses.finish(ClaimId(0), 100, 5 * MS);
    assert_eq!(uses.time_to_use_ns(ClaimId(2), 5 * MS), Some(0));
}

#[test]
fn beyond_the_horizon_is_at_the_horizon() {
    let mut uses = trained(1, &[1000], |options| options.horizon_ns = 7 * MS);
    serve(&mut uses, 1, 2, 0);
    assert_eq!(uses.time_to_use_ns(ClaimId(1), 0), Some(7 * MS));
    assert_eq!(uses.use_chance_permille(ClaimId(1), 7 * MS, 0), Some(0));
}

proptest! {
    #[test]
    fn whoever_queues_later_is_used_later_and_no_answer_jitters(
        lengths in vec(1..500_u64, 1..40),
        slots in 1..6_u64,
        written in 0..500_u64,
        scenarios in 1..100_u32,
        now_ns in 0..1000 * MS,
    ) {
        let mut uses = trained(usize::try_from(slots).unwrap(), &lengths, |options| options.scenarios = scenarios);
        serve(&mut uses, slots, slots + 8, written);
        let ask = || -> Vec<u64> {
            (slots..slots + 8).map(|id| uses.time_to_use_ns(ClaimId(id), now_ns).unwrap()).collect()
        };
        let times = ask();
        prop_assert!(times.is_sorted());
        prop_assert_eq!(&times, &ask());
        for id in slots..slots + 8 {
            let chances = [0, 10, 100, 1000, 10_000]
                .map(|ms| uses.use_chance_permille(ClaimId(id), ms * MS, now_ns).unwrap());
            prop_assert!(chances.is_sorted() && chances[4] <= 1000);
        }
    }
}
