//! `--shape`: which extents are meant for which model, all of them checked before anything is measured.

use crate::cli::Shape;
use crate::commands::profile::model_name;
use crate::error::CliError;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use trefoil_onnx::{Dim, Model, ModelPort, OnnxError};

/// Static shapes of a model's inputs, by their names.
pub type Shapes = BTreeMap<String, Vec<u64>>;

/// The shapes of one model. What they leave open may still be told by the files of its inputs.
///
/// # Errors
/// As [`of_models`], except for extents that are left open.
pub fn of_model(path: &Path, given: &[Shape]) -> Result<Shapes, CliError> {
    if given.is_empty() {
        return Ok(Shapes::new());
    }
    let inputs = Model::load(path)?.inputs();
    Ok(assign(&[(model_name(path), inputs)], given)?.remove(0))
}

/// The shapes of each model, with which every extent of its inputs is known.
///
/// # Errors
/// A model that cannot be read; a shape for an input that no model has, given twice, of another rank, against what a model says, or with an
/// extent of 0 where the model has none; extents that are left open, with the model, the inputs and the flags that fix them.
pub fn of_models(paths: &[PathBuf], given: &[Shape]) -> Result<Vec<Shapes>, CliError> {
    let mut models = paths.iter().map(|path| Ok(Model::load(path)?)).collect::<Result<Vec<_>, CliError>>()?;
    let named: Vec<_> = models.iter().zip(paths).map(|(model, path)| (model_name(path), model.inputs())).collect();
    let shapes = assign(&named, given)?;
    for (model, ((name, _), shapes)) in models.iter_mut().zip(named.iter().zip(&shapes)) {
        model.fix_shapes(shapes).map_err(|error| wrong(name, paths.len(), error))?;
    }
    Ok(shapes)
}

/// The shapes of each model that has settings of its own, which win. A model that cannot be read is told of when its turn comes, and what
/// is left open here may be told by the files of its inputs.
///
/// # Errors
/// As [`of_models`], except for those two.
pub fn beside_settings(paths: &[PathBuf], own: &[&[Shape]], given: &[Shape]) -> Result<Vec<Shapes>, CliError> {
    let none = || Ok(vec![Shapes::new(); paths.len()]);
    if given.is_empty() {
        return none();
    }
    let mut models: Vec<Option<Model>> = paths.iter().map(|path| Model::load(path).ok()).collect();
    if models.iter().all(Option::is_none) {
        return none();
    }
    let inputs = |model: &Option<Model>| model.as_ref().map_or_else(Vec::new, Model::inputs);
    let named: Vec<_> = models.iter().zip(paths).map(|(model, path)| (model_name(path), inputs(model))).collect();
    let mut shapes = assign(&named, given)?;
    for (shapes, own) in shapes.iter_mut().zip(own) {
        shapes.retain(|input, _| !own.iter().any(|shape| shape.input == *input));
    }
    for (model, ((name, _), shapes)) in models.iter_mut().zip(named.iter().zip(&shapes)) {
        match model.as_mut().map_or(Ok(()), |model| model.fix_shapes(shapes)) {
            Ok(()) | Err(OnnxError::SymbolicDims { .. }) => {}
            Err(error) => return Err(wrong(name, paths.len(), error)),
        }
    }
    Ok(shapes)
}

/// Refuses extents of 0 where the model does not have them: nothing would be computed, and every time would be that of doing nothing.
///
/// # Errors
/// What is wrong, without the name of the input.
pub fn refuse_empty(port: &ModelPort, extents: &[u64]) -> Result<(), String> {
    let declared = |axis: usize| port.dims.as_ref().is_some_and(|dims| dims.get(axis) == Some(&Dim::Fixed(0)));
    match extents.iter().enumerate().find(|&(axis, &extent)| extent == 0 && !declared(axis)) {
        Some((axis, _)) => Err(format!("dim {axis} is 0; extents start at 1 (the model has {})", port.dims_text())),
        None => Ok(()),
    }
}

/// The shapes that are meant for each model. `INPUT=…` is for every model that has such an input; `MODEL/INPUT=…` is for that model and
/// wins, because two models may call inputs of different shapes by the same name.
fn assign(models: &[(String, Vec<ModelPort>)], given: &[Shape]) -> Result<Vec<Shapes>, CliError> {
    let twice = given.iter().enumerate().find(|&(at, shape)| given[..at].iter().any(|one| one.input == shape.input));
    if let Some((_, shape)) = twice {
        return Err(CliError::Usage(format!("--shape names input `{}` twice", shape.input)));
    }
    let full = |model: &str, port: &ModelPort| format!("{model}/{}", port.name);
    let ports = || models.iter().flat_map(|(model, ports)| ports.iter().map(move |port| (model.as_str(), port)));
    let known = |name: &str| ports().any(|(model, port)| port.name == name || full(model, port) == name);
    if let Some(stray) = given.iter().find(|shape| !known(&shape.input)) {
        let (whose, have): (&str, Vec<String>) = match models {
            [(model, ports)] => {
                (&format!("{model} does not have; it has"), ports.iter().map(|port| port.name.clone()).collect())
            }
            _ => ("none of the models has; they have", ports().map(|(model, port)| full(model, port)).collect()),
        };
        return Err(CliError::Usage(format!(
            "--shape names input `{}`, which {whose} {}",
            stray.input,
            have.join(", ")
        )));
    }
    let mut found = Vec::new();
    for (model, ports) in models {
        let mut shapes = Shapes::new();
        for port in ports {
            let qualified = full(model, port);
            let shape = given.iter().find(|shape| shape.input == qualified);
            let Some(shape) = shape.or_else(|| given.iter().find(|shape| shape.input == port.name)) else { continue };
            refuse_empty(port, &shape.extents)
                .map_err(|what| CliError::Usage(format!("--shape of input `{}` of {model}: {what}", port.name)))?;
            shapes.insert(port.name.clone(), shape.extents.clone());
        }
        found.push(shapes);
    }
    Ok(found)
}

/// The error with the model's name: among several it says whose turn it would have been.
fn wrong(model: &str, models: usize, error: OnnxError) -> CliError {
    match error {
        OnnxError::SymbolicDims { open, .. } if models > 1 => {
            let whose = format!("{model}/");
            OnnxError::SymbolicDims { model: model.to_owned(), open, whose }.into()
        }
        error => CliError::Usage(format!("{model}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trefoil_core::DataType;

    fn port(name: &str, dims: &[Dim]) -> ModelPort {
        ModelPort { name: name.to_owned(), dtype: DataType::F32, dims: Some(dims.to_vec()) }
    }

    fn given(texts: &[&str]) -> Vec<Shape> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    /// Models `a` and `b`, both with inputs `x` (open) and `y` (empty).
    fn models() -> Vec<(String, Vec<ModelPort>)> {
        let ports = vec![port("x", &[Dim::Symbolic("n".to_owned()), Dim::Unknown]), port("y", &[Dim::Fixed(0)])];
        ["a", "b"].map(|name| (name.to_owned(), ports.clone())).to_vec()
    }

    fn refused(texts: &[&str]) -> String {
        assign(&models(), &given(texts)).unwrap_err().to_string()
    }

    #[test]
    fn a_shape_of_one_model_wins_over_that_of_all() {
        let found = assign(&models(), &given(&["x=8,8", "b/x=4,4"])).unwrap();
        assert_eq!(found[0], Shapes::from([("x".to_owned(), vec![8, 8])]));
        assert_eq!(found[1], Shapes::from([("x".to_owned(), vec![4, 4])]));
        assert_eq!(assign(&models(), &[]).unwrap(), [Shapes::new(), Shapes::new()]);
    }

    #[test]
    fn shapes_for_nobody_and_twice_are_refused() {
        assert!(refused(&["b/x=1,1", "b/x=2,2"]).contains("`b/x` twice"));
        assert_eq!(
            refused(&["z=1"]),
            "--shape names input `z`, which none of the models has; they have a/x, a/y, b/x, b/y"
        );
        let one = assign(&models()[..1], &given(&["b/x=1,1"])).unwrap_err().to_string();
        assert_eq!(one, "--shape names input `b/x`, which a does not have; it has x, y");
    }

    #[test]
    fn extents_are_0_only_where_the_model_says_so() {
        assert_eq!(
            refused(&["x=3,3", "b/x=3,0"]),
            "--shape of input `x` of b: dim 1 is 0; extents start at 1 (the model has [n, ?])"
        );
        assert!(refused(&["x=0"]).contains("dim 0 is 0"), "whatever its rank");
        assert_eq!(assign(&models(), &given(&["y=0"])).unwrap()[0]["y"], [0]);
        let unknown = ModelPort { dims: None, ..port("x", &[]) };
        assert!(refuse_empty(&unknown, &[2, 0]).is_err() && refuse_empty(&unknown, &[]).is_ok());
    }
}
