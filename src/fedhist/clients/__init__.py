"""What a client does: its objective, its local work, and the trainers that do it for many clients."""
