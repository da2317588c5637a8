"""The capture pass: fn runs once for all samples, its parameters behind taps; one backward pass gives each tap's cotangent."""
