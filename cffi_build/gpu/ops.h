/* Operations of a GPU runtime, DEVICE(name, (parameters)): the only functions by which the engine uses it.
 *
 * The list makes the table of functions (adapter.h), which each adapter fills. Every function returns 0 or the
 * runtime's error code; streams and events are the runtime's handles. For `alloc`, `pinned`, stream, event and copy
 * functions the device must be current in the calling thread. */

/* clang-format off */

DEVICE(version, (int *version))                                      /* major * 1000 + minor * 10 */
DEVICE(traits, (int *bits))                                          /* UCCH_EAGER and so on */
DEVICE(count, (int *devices))
DEVICE(bus, (int device, char *text, int room))                      /* PCI address */
DEVICE(target, (int device, char *text, int room))                   /* what kernels are compiled for; empty: unknown */
DEVICE(current, (int *device))                                       /* -1: none chosen in this thread */
DEVICE(use, (int device))
DEVICE(pointer, (const void *address, int *kind, int *device))       /* UCCH_MEMORY_* */
DEVICE(alloc, (void **address, size_t bytes))
DEVICE(release, (void *address))
DEVICE(room, (size_t *bytes))                                        /* free memory of the current device */
DEVICE(pinned, (void **address, size_t bytes))
DEVICE(unpin, (void *address))
DEVICE(host_register, (void *address, size_t bytes))                 /* pin memory that was mapped */
DEVICE(host_unregister, (void *address))
DEVICE(mapped, (void *memory, void **seen))                          /* the device's address of pinned memory */
DEVICE(lend, (const void *address, void *name, uint64_t *offset))    /* handle (UCCH_LENT_BYTES) for other processes to open the
                                                                      * allocation, and the address's offset in it */
DEVICE(borrow, (const void *name, void **address))                   /* its address on the current device, in another process */
DEVICE(give_back, (void *address))
DEVICE(flag, (void **word))                                          /* 4 bytes, 0, visible to host and streams */
DEVICE(copy, (void *dst, const void *src, size_t bytes, void *stream))
DEVICE(copy_rows, (void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t bytes, size_t rows, void *stream))
DEVICE(stream_new, (void **stream))                                  /* not ordered with the default stream */
DEVICE(stream_free, (void *stream))
DEVICE(stream_wait, (void *stream, void *event))
DEVICE(stream_sync, (void *stream))
DEVICE(stream_hold, (void *stream, void *word, uint32_t least))      /* until the word has reached `least` */
DEVICE(stream_write, (void *stream, void *word, uint32_t value))
DEVICE(stream_turn, (void *stream, void *told, uint32_t value, void *word, uint32_t least))   /* write, then hold */
DEVICE(stream_captures, (void *stream, int *does, uint64_t *which))  /* is it being captured? the capture's number */
DEVICE(capture_mode, (int *mode))                                    /* exchanged; of the calling thread */
DEVICE(event_new, (void **event))
DEVICE(event_free, (void *event))
DEVICE(event_record, (void *event, void *stream))
DEVICE(event_done, (void *event, int *done))
DEVICE(kernel, (const void *image, void **function))                 /* function `ucch` of a compiled module */
DEVICE(launch, (void *function, unsigned blocks, unsigned threads, void **arguments, void *stream))
DEVICE(error_name, (int code, const char **name))
