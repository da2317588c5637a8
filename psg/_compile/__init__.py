"""`psg.jit`: traces a function of tensors to one flat graph, compiles it, and keeps the compiled calls."""
