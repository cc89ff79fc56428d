"""One rank: Bridge's pretrain() with our callbacks and patches."""
