"""host: transport: processes of one machine over shared memory."""
