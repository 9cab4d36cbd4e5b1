/* Wait for a word. */
#include "words.cuh"

extern "C" __global__ void ucch(const void *, unsigned *dst, unsigned long long n, double) { AWAIT(dst, n); }
