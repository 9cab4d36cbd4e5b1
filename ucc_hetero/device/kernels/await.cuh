/* Write a word (with the upper half of `n`), then wait for another word; each only if its address is given. */
#include "words.cuh"

extern "C" __global__ void ucch(unsigned *src, unsigned *dst, unsigned long long n, double) {
    if (src) POST(src, n >> 32);
    if (dst) AWAIT(dst, n);
}
