"""From a call to its result: chunk by chunk, by the fastest rung that can run fn (capture, `vmap(grad)`, the loop), with derivatives."""
