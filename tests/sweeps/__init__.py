"""What PyTorch's own tests know of its modules and ops, swept through psg and held to the loop.

    python -m sweeps.ops            every op, every sample input, every role of its tensors (from the folder tests)
    python -m sweeps.modules        every module, every sample input

print a table. `test_sweep_ops` and `test_sweep_modules` run what fits into a test; `--thorough` runs all there too.
"""
