/* The memory of numpy's arrays straight from malloc: numpy caches freed blocks under 1 KiB, so that no sanitizer
 * would notice their use after free. The functions are those of PyDataMemAllocator. */
#include <stdlib.h>

void *blocks_malloc(void *context, size_t bytes) { return malloc(bytes ? bytes : 1); }

void *blocks_calloc(void *context, size_t count, size_t bytes) { return calloc(count ? count : 1, bytes ? bytes : 1); }

void *blocks_realloc(void *context, void *block, size_t bytes) { return realloc(block, bytes ? bytes : 1); }

void blocks_free(void *context, void *block, size_t bytes) { free(block); }
