//! A product with a norm of its rows against the two one after the other, on every instruction set, with one and two threads.

mod support;

use proptest::prelude::*;
use support::{Random, bits, every_kernels, name_of, tiled, view};
use trefoil_kernels::{
    Activation, ActivationScale, Adapter, Codes, Epilogue, GemmSink, Kernels, Modulation, Norm, NormSink, Operands,
    RowSink, Rows, RowsMut, Workspace, rotary_table,
};
use trefoil_weights::TiledView;

const EPS: f32 = 1e-6;
const SCALE: f32 = 0.021;

/// A product with all that it needs.
struct Product<'a> {
    input: Codes<'a>,
    weights: TiledView<'a>,
    epilogue: Epilogue<'a>,
    rows: usize,
    columns: usize,
}

impl Product<'_> {
    fn padded(&self) -> usize {
        self.columns.next_multiple_of(32)
    }

    fn codes<'c>(&self, codes: &'c mut Vec<i8>) -> RowSink<'c> {
        codes.clear();
        codes.resize(self.rows * self.padded(), 99);
        RowSink::Codes { out: RowsMut::new("y", codes, self.rows, self.columns, self.padded()).unwrap(), scale: SCALE }
    }

    fn floats<'f>(&self, floats: &'f mut [f32]) -> RowsMut<'f, f32> {
        RowsMut::dense("x", floats, self.rows, self.columns).unwrap()
    }

    /// The norm of what `run` leaves in `floats`, by the plain operators.
    fn plain(&self, kernels: &Kernels, norm: Norm<'_>, floats: &[f32]) -> Vec<i8> {
        let input = Rows::dense("x", floats, self.rows, self.columns).unwrap();
        let (mut codes, mut workspace) = (Vec::new(), Workspace::new());
        let sink = self.codes(&mut codes);
        match norm {
            Norm::Layer { eps, modulation } => kernels.layer_norm(input, eps, modulation, sink, &mut workspace),
            Norm::Rms { eps, gain, rotary } => kernels.rms_norm(input, eps, gain, rotary, sink, &mut workspace),
        }
        .unwrap();
        codes
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_product_and_its_norm_are_both_of_them(
        rows in prop_oneof![1usize..50, 90usize..260], d_in in 1usize..70, heads in 1usize..4, pairs in prop_oneof![Just(8usize), 1usize..20],
        rank in prop_oneof![Just(0usize), 1usize..20], seed in any::<u64>()
    ) {
        let mut random = Random::new(seed);
        let columns = heads * 2 * pairs;
        let weights = tiled(&random.normals(d_in * columns, 0.1), d_in, columns);
        let up = (rank > 0).then(|| tiled(&random.normals(rank * columns, 0.1), rank, columns));
        let (stride, hidden_stride) = (d_in.next_multiple_of(32), rank.next_multiple_of(32));
        let (codes, hidden) = (random.codes(rows * stride), random.codes(rows * hidden_stride));
        let hidden_scales: Vec<f32> = (0..rows).map(|_| 0.01 + 0.01 * random.normal().abs()).collect();
        let [bias, gate, gain, shift] = [(); 4].map(|()| random.normals(columns, 1.0));
        let state = random.normals(rows * columns, 1.0);
        let table = rotary_table([1, 1, rows], 2 * pairs).unwrap();
        let product = Product {
            input: Codes { codes: Rows::new("x", &codes, rows, d_in, stride).unwrap(), scale: ActivationScale::Tensor(0.0137) },
            weights: view(&weights),
            epilogue: Epilogue {
                bias: Some(&bias),
                adapter: up.as_ref().map(|up| Adapter {
                    hidden: Codes { codes: Rows::new("h", &hidden, rows, rank, hidden_stride).unwrap(), scale: ActivationScale::Row(&hidden_scales) },
                    up: view(up),
                    factor: 2.0,
                }),
                activation: Activation::Identity,
            },
            rows,
            columns,
        };
        let norms = [
            Norm::Layer { eps: EPS, modulation: Modulation::AdaLn { scale: &gain, shift: &shift } },
            Norm::Layer { eps: EPS, modulation: Modulation::Affine { gain: &gain, bias: &shift } },
            Norm::Rms { eps: EPS, gain: &gain, rotary: None },
            Norm::Rms { eps: EPS, gain: &gain, rotary: Some(&table) },
        ];
        for kernels in every_kernels() {
            let mut workspace = Workspace::new();
            let (mut floats, mut want_state) = (vec![f32::NAN; rows * columns], state.clone());
            let to_floats = GemmSink::F32 { out: product.floats(&mut floats), operands: Operands::F32 };
            kernels.gemm_w8a8(&product.input, &product.weights, &product.epilogue, to_floats, &mut workspace).unwrap();
            let to_state = GemmSink::Residual { state: product.floats(&mut want_state), gate: Some(&gate), precision: Operands::F16 };
            kernels.gemm_w8a8(&product.input, &product.weights, &product.epilogue, to_state, &mut workspace).unwrap();
            for norm in norms {
                let mut codes = Vec::new();
                let sink = NormSink { norm, out: product.codes(&mut codes) };
                kernels.gemm_w8a8_norm(&product.input, &product.weights, &product.epilogue, sink, &mut workspace).unwrap();
                prop_assert_eq!(&codes, &product.plain(&kernels, norm, &floats), "{} {:?}", name_of(&kernels), norm);

                let mut got_state = state.clone();
                let sink = NormSink { norm, out: product.codes(&mut codes) };
                let to = GemmSink::Residual { state: product.floats(&mut got_state), gate: Some(&gate), precision: Operands::F16 };
                kernels.gemm_w8a8_then_norm(&product.input, &product.weights, &product.epilogue, to, sink, &mut workspace).unwrap();
                prop_assert_eq!(bits(&got_state), bits(&want_state), "{}", name_of(&kernels));
                prop_assert_eq!(&codes, &product.plain(&kernels, norm, &want_state), "{} {:?}", name_of(&kernels), norm);
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let kernels = &every_kernels()[0];
    let weights = tiled(&[0.5; 32 * 32], 32, 32);
    let (codes, vector) = ([1i8; 3 * 32], [1f32; 32]);
    let input = Codes { codes: Rows::dense("x", &codes, 3, 32).unwrap(), scale: ActivationScale::Tensor(1.0) };
    let run = |rows: usize, eps: f32, gain: &[f32], positions: Option<usize>| {
        let mut out = vec![0i8; rows * 32];
        let table = positions.map(|count| rotary_table([1, 1, count], 32).unwrap());
        let out = RowSink::Codes { out: RowsMut::dense("y", &mut out, rows, 32).unwrap(), scale: 1.0 };
        let sink = NormSink { norm: Norm::Rms { eps, gain, rotary: table.as_ref() }, out };
        let result = kernels.gemm_w8a8_norm(&input, &view(&weights), &Epilogue::default(), sink, &mut Workspace::new());
        result.map_err(|error| error.to_string())
    };
    run(3, EPS, &vector, Some(3)).unwrap();
    assert_eq!(
        run(4, EPS, &vector, None).unwrap_err(),
        "gemm_w8a8_norm: the input is 3×32 but the destination is 4×32; they must have the same shape"
    );
    assert!(run(3, 0.0, &vector, None).unwrap_err().contains("eps"));
    assert!(run(3, EPS, &vector[1..], None).unwrap_err().contains("at least one value per column"));
    assert!(run(3, EPS, &vector, Some(2)).unwrap_err().contains("a position per row"));
    let (mut codes, mut out) = (vec![0i8; 3 * 32], vec![0i8; 3 * 32]);
    let to = GemmSink::Codes { out: RowsMut::dense("x", &mut codes, 3, 32).unwrap(), scale: 1.0 };
    let norm = Norm::Layer { eps: EPS, modulation: Modulation::None };
    let out = RowSink::Codes { out: RowsMut::dense("y", &mut out, 3, 32).unwrap(), scale: 1.0 };
    let sink = NormSink { norm, out };
    let result =
        kernels.gemm_w8a8_then_norm(&input, &view(&weights), &Epilogue::default(), to, sink, &mut Workspace::new());
    assert_eq!(
        result.unwrap_err().to_string(),
        "gemm_w8a8_then_norm: the product is codes; a norm takes floats or a state"
    );
}
