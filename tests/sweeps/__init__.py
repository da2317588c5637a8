"""What PyTorch's own tests know of its modules and ops, and models of `transformers`, swept through psg and held to the loop.

    python -m sweeps.ops            every op, every sample input, every role of its tensors (from the folder tests)
    python -m sweeps.modules        every module, every sample input
    python -m sweeps.architectures  every architecture of `sweeps.models`

print a table. `test_sweep_ops` and `test_sweep_modules` run what fits into a test, `test_sweep_architectures` all of them.
"""
