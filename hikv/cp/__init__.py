"""Context parallelism: one logical prefix, its pages sharded over ranks, gathered layer by layer.

Read `shard_map` (who owns which page), `plan` (what a batch gathers, in pages), `backends`, `peers`
and `nccl` (who moves the bytes), then `gather` (when). `copies` keeps backups on their owners.
"""
