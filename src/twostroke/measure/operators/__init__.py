"""`twostroke bench kernels`: each operator by itself, checked first, then timed beside the machine's limits."""
