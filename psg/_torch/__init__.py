"""What psg knows of torch: its functions, the state around a call, and all uses of autograd's and functorch's internals."""
