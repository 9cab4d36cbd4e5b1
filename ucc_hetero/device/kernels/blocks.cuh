/* Blocks that each process a slice of the same data. */
__device__ unsigned long long edge(unsigned long long bytes, unsigned block, unsigned blocks) {
    unsigned long long at = (bytes + 63) / 64 * block / blocks * 64;
    return at < bytes ? at : bytes;
}
/* True if this block is the last to arrive here. */
__device__ bool last_at(unsigned *counter, unsigned blocks) {
    __threadfence_system();
    return blocks == 1 || atomicInc(counter, blocks - 1) == blocks - 1;
}
