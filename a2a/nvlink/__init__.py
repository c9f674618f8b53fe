"""nvlink: the transport between GPUs of one NVLink domain; memory, compile, launch, kernels.

Importing any module but `driver`, `memory`, `compile` and `launch` needs no CUDA package; `transport.TRANSPORT.reasons`
says what is missing.
"""
