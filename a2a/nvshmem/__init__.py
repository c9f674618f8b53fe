"""nvshmem: transport: nvlink's kernels on memory that NVSHMEM has allocated."""
