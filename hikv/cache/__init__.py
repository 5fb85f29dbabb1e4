"""The lean HiRadix cache: a prefix tree over KV pages on the GPU, in host memory and in storage.

An engine's loop, here with a forward pass that only counts what it would compute. It runs as it
stands. On a GPU the pool is `DevicePool(KVBuffer.from_layers(…))`, the engine's own tensors, and
`after` is the stream on which the engine computes:

```python
import torch
from hikv import DevicePool, HiCacheConfig, HiRadixCache, HostPool, KVSpec

spec = KVSpec(num_layers=4, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16)
config = HiCacheConfig(write_policy="write_through", load_back_threshold=32)
device = DevicePool.empty(spec, "layer_first", num_pages=64)
cache = HiRadixCache(device, HostPool.beside(device, config), config, after=None)
system = list(range(512))
waiting = [(f"chat {n}", [*system, *range(n * 1000, n * 1000 + 200)]) for n in (1, 2, 1)]
computed = []
for turn, (rid, prompt) in enumerate(waiting):
    cache.poll()  # 1. what the copies in the background have finished
    rid = f"{rid}, turn {turn}"
    request = cache.acquire(rid, prompt, limit=len(prompt) - 1)  # 2. match and lock in one step
    cache.prefetch(rid)  # 3. ask storage; without storage that is 0 tokens
    if not cache.prefetch_ready(rid) or not cache.admission_cost(rid).fits:
        cache.cancel(rid)  # 4. no room now: back to the queue
        continue
    if cache.load_back(rid, quota=4096).outcome == "defer":  # 5. from the host to the GPU
        cache.cancel(rid)  # another request is loading the same prefix: ask again next tick
        continue
    cache.allocate(rid, len(prompt))  # 6. pages for what is computed
    for layer in range(spec.num_layers):  # 7. the forward pass, over request.pages
        request.wait_layer(layer)  # layer + 1 moves while this one is computed
    computed.append(request.lengths.extend_len)
    cache.insert(rid)  # 8. others can find it from here on; backups start
    cache.release(rid)  # 9. unlocked: it stays cached until the room is needed
cache.check()
print(computed)  # the second prompt shares 512 tokens, the third all but its last page
cache.close()
```
"""
