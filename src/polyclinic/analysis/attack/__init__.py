"""What somebody who intercepts features or gradients can make of them: pictures of patients, or nothing."""
