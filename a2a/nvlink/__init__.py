"""nvlink: the transport between GPUs of one NVLink domain; memory, compile, launch, kernels.

Importing `transport`, `params` and `tuning` needs no CUDA package; `transport.TRANSPORT.reasons`
says what is missing.
"""
