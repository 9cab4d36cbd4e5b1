/* The memory of numpy's arrays straight from malloc: numpy keeps freed blocks under 1 KiB and hands them out again, so
 * that no sanitizer sees a use of them after free. In the form of PyDataMemAllocator's functions. */
#include <stdlib.h>

void *blocks_malloc(void *context, size_t bytes) { return malloc(bytes ? bytes : 1); }

void *blocks_calloc(void *context, size_t count, size_t bytes) { return calloc(count ? count : 1, bytes ? bytes : 1); }

void *blocks_realloc(void *context, void *block, size_t bytes) { return realloc(block, bytes ? bytes : 1); }

void blocks_free(void *context, void *block, size_t bytes) { free(block); }
