//! A forecast of data-parallel clips against a stream that really runs: the same work on the same lane in the same order.
//!
//! The stream runs in virtual time. Engines and last stage compute nothing; each says what it costs and goes on when the other lane's clock has
//! come as far, so that what a lane sees of the other is what it would see if the costs were real. Nothing is timed.

mod support;

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::ThreadId;
use support::{Random, SmallModel, kernels};
use trefoil_video::dit::Host;
use trefoil_video::engine::Engine;
use trefoil_video::schedule::Piece;
use trefoil_video::stream::{
    Cost, Denoised, Division, LaneCosts, LastStageOn, Span, StreamItem, Work, forecast, run_data_parallel_with,
};
use trefoil_video::{Clip, Lane, Model, NumericPath, VideoError};

/// What a lane's work costs.
#[derive(Debug, Clone, Copy)]
struct Costs {
    conditions: f64,
    block: f64,
    last: f64,
}

/// The clocks of two lanes.
struct Clocks {
    now: Mutex<[f64; 2]>,
    moved: Condvar,
    lanes: Mutex<HashMap<ThreadId, usize>>,
}

impl Clocks {
    fn new() -> Clocks {
        Clocks { now: Mutex::new([0.0; 2]), moved: Condvar::new(), lanes: Mutex::default() }
    }

    /// Something of this cost is done on `lane`; returns when nothing can happen on the other one before that time any more.
    fn advance(&self, lane: usize, cost: f64) {
        self.lanes.lock().unwrap().insert(std::thread::current().id(), lane);
        let mut now = self.now.lock().unwrap();
        now[lane] += cost;
        self.moved.notify_all();
        let until = now[lane];
        drop(self.moved.wait_while(now, |now| now[1 - lane] < until).unwrap());
    }

    /// The calling lane got no clip: nobody waits for it any more.
    fn rest(&self) {
        let lane = self.lanes.lock().unwrap()[&std::thread::current().id()];
        self.now.lock().unwrap()[lane] = f64::INFINITY;
        self.moved.notify_all();
    }
}

/// An engine whose blocks cost virtual time.
struct VirtualEngine {
    lane: usize,
    costs: Costs,
    clocks: Arc<Clocks>,
}

impl Engine for VirtualEngine {
    fn name(&self) -> &'static str {
        ["first", "second"][self.lane]
    }

    fn path(&self) -> NumericPath {
        NumericPath::W8a16
    }

    fn cores(&self) -> &[usize] {
        &[]
    }

    fn run_blocks(&mut self, _: &Clip, piece: &Piece, _: &mut [f32]) -> Result<(), VideoError> {
        if (piece.step, piece.branch, piece.blocks.start) == (0, 0, 0) {
            self.clocks.advance(self.lane, self.costs.conditions);
        }
        for _ in piece.blocks.clone() {
            self.clocks.advance(self.lane, self.costs.block);
        }
        Ok(())
    }

    fn scratch_bytes(&self) -> usize {
        0
    }
}

/// The clips, which tell the clocks when there are no more.
struct Queue {
    items: std::vec::IntoIter<StreamItem>,
    clocks: Arc<Clocks>,
}

impl Iterator for Queue {
    type Item = StreamItem;

    fn next(&mut self) -> Option<StreamItem> {
        let next = self.items.next();
        if next.is_none() {
            self.clocks.rest();
        }
        next
    }
}

/// What a lane does, one after the other: which lane's clip and the how manieth of it, what, and how many blocks.
type Done = (usize, usize, Work, usize);

/// By lane. A clip is named by the lane whose blocks it has, since both lanes may be the first at the queue.
fn order(spans: &[Span]) -> [Vec<Done>; 2] {
    let mut clips: [Vec<usize>; 2] = [Vec::new(), Vec::new()];
    let mut sorted = spans.to_vec();
    sorted.sort_by(|a, b| a.end_ms.total_cmp(&b.end_ms));
    for span in sorted.iter().filter(|span| span.work == Work::Blocks) {
        if !clips[span.lane].contains(&span.item) {
            clips[span.lane].push(span.item);
        }
    }
    let place = |item: usize| {
        let lane = usize::from(clips[1].contains(&item));
        (lane, clips[lane].iter().position(|&known| known == item).unwrap())
    };
    [0, 1].map(|lane| {
        let of_lane = sorted.iter().filter(|span| span.lane == lane);
        of_lane
            .map(|span| {
                let (owner, number) = place(span.item);
                (owner, number, span.work, span.blocks)
            })
            .collect()
    })
}

fn ran(model: &Arc<Model>, items: Vec<StreamItem>, costs: [Costs; 2], on: LastStageOn) -> Vec<Span> {
    let clocks = Arc::new(Clocks::new());
    let mut lanes: Vec<Lane> = [0, 1]
        .map(|lane| {
            let engine = VirtualEngine { lane, costs: costs[lane], clocks: Arc::clone(&clocks) };
            Lane::new(Box::new(engine), Host::new(kernels()), Arc::clone(model))
        })
        .into();
    let finish = |done: &Denoised<'_>| {
        clocks.advance(done.lane, costs[done.lane].last);
        Ok(())
    };
    let queue = Queue { items: items.into_iter(), clocks: Arc::clone(&clocks) };
    run_data_parallel_with(&mut lanes, queue, on, &finish, &|_, _| Ok(())).unwrap().spans
}

fn told(costs: [Costs; 2], blocks: usize, clips: usize, on: LastStageOn) -> Vec<Span> {
    let lanes = costs.map(|costs| LaneCosts {
        conditions: Cost::always(costs.conditions),
        blocks: vec![Cost::always(costs.block); blocks],
        last: Cost::always(costs.last),
    });
    forecast(&lanes, Division::Whole(on), clips).spans
}

#[test]
fn a_forecast_has_the_order_of_a_stream_that_runs() {
    const BLOCKS: usize = 12;
    let small = SmallModel::new();
    let model = Arc::new(Model::open(&small.packed()).unwrap());
    let mut random = Random::new(31);
    let items: Vec<StreamItem> = (0..6)
        .map(|number| StreamItem {
            number,
            noise: random.tensor("noise", &[4, 1, 4, 6], 1.0),
            text: random.tensor("text", &[10, small.config.text_dim], 1.0),
            negative: None,
        })
        .collect();
    let costs = |conditions, block, last| Costs { conditions, block, last };
    let mut cases = vec![
        // The first lane's clip comes while the second has its conditions made: it waits for the block behind them.
        ([costs(0.5, 1.0, 0.0), costs(20.25, 1.5, 3.125)], LastStageOn::Last),
        // While the second ends its own clip: the next one begins first.
        ([costs(1.0, 1.5, 0.0), costs(1.0, 1.0, 30.0625)], LastStageOn::Last),
        // Several at a time.
        ([costs(0.125, 0.25, 0.0), costs(1.0, 9.0, 40.0)], LastStageOn::Last),
        ([costs(0.125, 0.25, 7.0), costs(1.0, 9.0, 4.03125)], LastStageOn::Each),
    ];
    let mut any = |scale: f64| f64::from(random.normal().abs()) * scale + 1e-3;
    for number in 0..24 {
        let one = costs(any(4.0), any(1.0), any(9.0));
        let other = costs(any(4.0), any(1.0), any(9.0));
        cases.push(([one, other], if number % 4 == 0 { LastStageOn::Each } else { LastStageOn::Last }));
    }
    let mut interruptions = 0;
    for (costs, on) in cases {
        for clips in [2, 3, 6] {
            let (want, got) = (ran(&model, items[..clips].to_vec(), costs, on), told(costs, BLOCKS, clips, on));
            assert_eq!(order(&got), order(&want), "{costs:?} {on:?} {clips}");
            interruptions += got.iter().filter(|span| span.work == Work::Blocks && span.blocks < BLOCKS).count();
        }
    }
    assert!(interruptions > 50, "clips of the other lane are ended between blocks: {interruptions}");
}
