/* Constants that C and Python share. Plain `#define NAME number` lines only: cffi reads this file too. */

/* Base buffers of a span. */
#define UCCH_SEND 0
#define UCCH_RECV 1
#define UCCH_TMP 2

/* Steps of programs. */
#define UCCH_STEP_COLL 0
#define UCCH_STEP_SEND 1
#define UCCH_STEP_RECV 2
#define UCCH_STEP_EXCHANGE 3
#define UCCH_STEP_LOCAL 4
/* Local steps. */
#define UCCH_COPY 0
#define UCCH_COMBINE 1
#define UCCH_CAST 2
#define UCCH_SCALE 3

/* Other kernels: write a word and wait for one, a whole short call, one side of a message, pieces of pages, and all
 * messages of a stage over wires. */
#define UCCH_AWAIT 4
#define UCCH_FUSED 5
#define UCCH_LANE_COPY 6
#define UCCH_PIECES 7
#define UCCH_RING_COPY 8
/* Element types that UCC lacks, numbered like its own. */
#define UCCH_E4M3FN 256
#define UCCH_E4M3FNUZ 264
/* Flags of a message between streams: it is a receive; a send that completes when received; ordered in its stream;
 * copied by the host. */
#define UCCH_LANE_MESSAGE_COMES 1
#define UCCH_LANE_MESSAGE_SYNC 2
#define UCCH_LANE_MESSAGE_ORDERED 4
#define UCCH_LANE_MESSAGE_BY_HOST 8
/* Most bytes that a call may move to be run by one kernel with several blocks. */
#define UCCH_FUSED_BYTES 786432

/* Most network threads of a process in each direction, and bytes of a message that one sends at a time: fewer cost more
 * than they gain, more keep other wires waiting. */
#define UCCH_MOST_WIRES 16
#define UCCH_WIRE_RANGE 131072

/* Memory types of a GPU runtime. */
#define UCCH_MEMORY_UNKNOWN 0
#define UCCH_MEMORY_PINNED 1
#define UCCH_MEMORY_DEVICE 2
#define UCCH_MEMORY_MANAGED 3
/* Size of the handle with which a process opens another's device memory. */
#define UCCH_LENT_BYTES 64
/* Properties of a GPU runtime, one bit each. EAGER: kernels are loaded before their first launch, where loading would
 * wait for the device. WAITS_ANYWHERE: a stream can wait for any word in memory, not only for the runtime's own.
 * OWN_QUEUES: streams share no queue, in which a waiting stream would block others. TELLS_CURRENT: the runtime can tell
 * that a thread has not chosen a device. */
#define UCCH_EAGER 1
#define UCCH_WAITS_ANYWHERE 8
#define UCCH_OWN_QUEUES 16
#define UCCH_TELLS_CURRENT 32
/* Capture mode of a thread that may make any call during a capture, outside of the graph. */
#define UCCH_RELAXED 2

/* Statuses of the engine, outside both libraries' ranges. ALIASED: send and receive buffer are the same; the in-place
 * program is needed. LATER: the call would have to wait for something that only its caller can complete. PINNED: no
 * pinned memory is left. FAIL_LOST: libucp has dropped a message. FAIL_STALE: the region is gone. FAIL_RANGE: an offset
 * outside the region. FAIL_PATH: two processes share no memory and have no wires between them. FAIL_CONNECTION: a
 * connection of a wire, or a link, has broken. */
#define UCCH_FAIL_TIMEOUT -1001
#define UCCH_FAIL_MISMATCH -1002
#define UCCH_FAIL_PEER -1003
#define UCCH_FAIL_TRUNCATED -1004
#define UCCH_FAIL_MEMORY -1005
#define UCCH_FAIL_ARGUMENT -1006
#define UCCH_FAIL_BUSY -1007
#define UCCH_ALIASED -1008
#define UCCH_FAIL_BROKEN -1011
#define UCCH_FAIL_DEVICE -1009
#define UCCH_FAIL_CANCELLED -1010
#define UCCH_LATER -1012
#define UCCH_FAIL_REFUSED -1013
#define UCCH_FAIL_PINNED -1015
#define UCCH_FAIL_STALE -1016
#define UCCH_FAIL_RANGE -1017
#define UCCH_FAIL_REVOKED -1020
#define UCCH_FAIL_LOST -1021
#define UCCH_FAIL_PATH -1022
#define UCCH_FAIL_CONNECTION -1023

/* Size of a link's description: two addresses and what is between them. */
#define UCCH_PATH_BYTES 96

/* One-sided communication. Transfer kinds PUT to AWAIT (AWAIT concerns this side only; the others are counted per peer)
 * and counts per peer: failed transfers, bytes, notifications. Limits: counters of a process, pieces of a list, bytes
 * of a notification. */
#define UCCH_RMA_PUT 0
#define UCCH_RMA_GET 1
#define UCCH_RMA_FLUSH 2
#define UCCH_RMA_OPEN 3
#define UCCH_RMA_AWAIT 7
#define UCCH_RMA_FAILED 4
#define UCCH_RMA_BYTES 5
#define UCCH_RMA_NOTICES 6
#define UCCH_RMA_COUNTS 7
/* Bits of a worker's uid, from the lowest, that are its process id. */
#define UCCH_RMA_PROCESS 4194303
#define UCCH_RMA_COUNTERS 1024
#define UCCH_RMA_ENTRIES 1048576
#define UCCH_RMA_NOTICE 65536
/* Size of the handle with which a peer opens a region of device memory. */
#define UCCH_RMA_LENT 72
/* Most bytes that the addresses of a process's wires take. */
#define UCCH_RMA_REACH 65536

/* Calls in graphs: the kernel was not loaded before the capture; two replays ran at the same time. */
#define UCCH_FAIL_COLD -1018
#define UCCH_FAIL_OVERLAP -1019

/* Rings between two ranks in one direction: by message size, and extra ones for graphs. */
#define UCCH_RINGS 9

/* State of a peer: alive, ended normally, dead; on another host also: process silent, host unreachable. UCCH_ALL_PEERS
 * stands for all peers: the best of their states. */
#define UCCH_THERE 0
#define UCCH_LEFT 1
#define UCCH_DIED 2
#define UCCH_SILENT 3
#define UCCH_UNREACHABLE 4
#define UCCH_ALL_PEERS -1

/* Bit positions in a communicator's tags: the source rank, and the flags of the package's own messages and of
 * offers. */
#define UCCH_SOURCE_BIT 31
#define UCCH_OWN_BIT 49
#define UCCH_OFFER_BIT 50

#define UCCH_LABEL_BYTES 48
/* Size of a refusal's text, and the signature that stands for a refused call. */
#define UCCH_REFUSAL_BYTES 240
#define UCCH_REFUSED_CALL 1380271700
/* Signature that is published while a call is set up: it matches any call but a refused one. */
#define UCCH_ANY_CALL 1380271702

/* Size of a parcel's data, most ranks for exchanges by parcels, and `from` of a rank that reads no parcel. */
#define UCCH_PARCEL_BYTES 496
#define UCCH_PARCEL_RANKS 32
#define UCCH_NOBODY -2

/* A rank's state when a communicator is to be made from another one: it cannot use their job any more, or can; the
 * results for all ranks if there is no number; and the most spare numbers that a rank offers. */
#define UCCH_READY 1
#define UCCH_GOES_ON 2
#define UCCH_NOT_READY -3
#define UCCH_NO_MORE -2
#define UCCH_ASK -1
#define UCCH_SPARES 32

/* Bytes of the header of a timeline file and of a flight recorder. */
#define UCCH_TRACE_HEADER 4096

/* Kinds of flight records: a call run by the host, in streams, captured in a graph, run by MPI, or refused; messages;
 * one-sided transfers (plus UCCH_RMA_*). And causes of a dump. */
#define UCCH_RECORD_CALL 1
#define UCCH_RECORD_STREAM 2
#define UCCH_RECORD_GRAPH 3
#define UCCH_RECORD_MPI 4
#define UCCH_RECORD_REFUSED 5
#define UCCH_RECORD_SEND 6
#define UCCH_RECORD_RECEIVE 7
#define UCCH_RECORD_TRANSFER 8
#define UCCH_DUMP_ASKED 1
#define UCCH_DUMP_SIGNAL 2
#define UCCH_DUMP_FAILURE 3
