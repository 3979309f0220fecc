"""`twostroke bench kernels`: each operator is checked, then timed and compared with the machine's limits."""
