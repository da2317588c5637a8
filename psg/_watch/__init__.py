"""What fn does beside computing: what it writes into, closes over, changes and leaves behind."""
