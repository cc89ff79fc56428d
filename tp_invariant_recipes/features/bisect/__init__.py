"""tpi bisect: the step, the module and the tensor where two runs begin to differ."""
