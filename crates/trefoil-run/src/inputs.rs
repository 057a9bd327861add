//! Matching given tensors to model inputs.

use crate::RunError;
use trefoil_core::{HostTensor, TensorInfo};

/// Finds, for every port, the given tensor of that name; returns indices into `given`, in port order.
///
/// # Errors
/// [`RunError::DuplicateInput`], [`RunError::UnknownInput`], [`RunError::MissingInput`] (all missing ones at once) or
/// [`RunError::InputMismatch`] with both types and shapes.
pub fn match_inputs(ports: &[TensorInfo], given: &[&HostTensor]) -> Result<Vec<usize>, RunError> {
    for (index, tensor) in given.iter().enumerate() {
        let name = &tensor.info().name;
        if given[..index].iter().any(|earlier| earlier.info().name == *name) {
            return Err(RunError::DuplicateInput { name: name.clone() });
        }
        if !ports.iter().any(|port| port.name == *name) {
            return Err(RunError::UnknownInput { extra: name.clone(), have: list(ports) });
        }
    }
    let missing: Vec<TensorInfo> =
        ports.iter().filter(|port| !given.iter().any(|tensor| tensor.info().name == port.name)).cloned().collect();
    if !missing.is_empty() {
        let names: Vec<_> = given.iter().map(|tensor| format!("`{}`", tensor.info().name)).collect();
        let given = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
        return Err(RunError::MissingInput { missing: list(&missing), given });
    }
    ports
        .iter()
        .map(|port| {
            let index = given.iter().position(|tensor| tensor.info().name == port.name).expect("checked above");
            let have = given[index].info();
            if have.dtype == port.dtype && have.shape == port.shape {
                return Ok(index);
            }
            let hint = if have.dtype != port.dtype {
                "; convert the values first"
            } else if have.elements() == port.elements() {
                "; reshape it"
            } else {
                "; give that shape, or fix another with --shape"
            };
            Err(RunError::InputMismatch { want: Box::new(port.clone()), have: Box::new(have.clone()), hint })
        })
        .collect()
}

fn list(ports: &[TensorInfo]) -> String {
    if ports.is_empty() {
        return "none".to_owned();
    }
    ports.iter().map(|port| format!("`{}` {}{:?}", port.name, port.dtype, port.shape)).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use trefoil_core::DataType;

    fn ports() -> Vec<TensorInfo> {
        vec![TensorInfo::new("image", DataType::F32, [1u64, 3, 4, 4]), TensorInfo::new("length", DataType::I64, [1u64])]
    }

    #[test]
    fn order_does_not_matter() {
        let image = HostTensor::zeros(ports()[0].clone());
        let length = HostTensor::zeros(ports()[1].clone());
        assert_eq!(match_inputs(&ports(), &[&length, &image]).unwrap(), [1, 0]);
    }

    #[test]
    fn every_mistake_is_named_in_one_line() {
        let image = HostTensor::zeros(ports()[0].clone());
        let length = HostTensor::zeros(ports()[1].clone());
        let say = |given: &[&HostTensor]| match_inputs(&ports(), given).unwrap_err().to_string();
        assert_eq!(say(&[&image]), "the model needs input `length` i64[1], which was not given; given: `image`");
        assert_eq!(say(&[&image, &length, &image]), "input `image` is given twice");
        let other = HostTensor::zeros(TensorInfo::new("imgae", DataType::F32, [1u64]));
        assert_eq!(
            say(&[&other]),
            "`imgae` is no input of the model; its inputs are `image` f32[1, 3, 4, 4], `length` i64[1]"
        );
        let flat = HostTensor::zeros(TensorInfo::new("image", DataType::F32, [48u64]));
        assert_eq!(say(&[&flat, &length]), "input `image` must be f32 [1, 3, 4, 4] but is f32 [48]; reshape it");
        let wide = HostTensor::zeros(TensorInfo::new("length", DataType::F64, [1u64]));
        assert!(say(&[&image, &wide]).ends_with("must be i64 [1] but is f64 [1]; convert the values first"));
    }
}
