"""What the device does best: costs of bytes and ops, memory, products of large matrices."""
