"""Tables that tpi keeps in files or by heart: fields of Bridge, sizes of models, flags of Megatron-LM, loggers."""
