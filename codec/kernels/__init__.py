"""The kernels: one source for CPU and GPU (`*.h`), their entries, and the loader of the CPU library."""
