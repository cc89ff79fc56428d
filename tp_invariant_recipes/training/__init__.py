"""What one rank does: Bridge's pretrain() with our callbacks and patches."""
