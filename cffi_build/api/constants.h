/* Constants that C and Python share. Plain `#define NAME number` lines only: cffi reads this file too. */

/* Buffers whose address a span counts from. */
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

/* Further kernels: write a word and wait for one, all of a short call, one side of a message, pieces of pages, and all
 * messages of a stage that wires carry. */
#define UCCH_AWAIT 4
#define UCCH_FUSED 5
#define UCCH_LANE_COPY 6
#define UCCH_PIECES 7
#define UCCH_RING_COPY 8
/* Types of elements that UCC has none of, numbered as its own are. */
#define UCCH_E4M3FN 256
#define UCCH_E4M3FNUZ 264
/* How a message between streams is begun: it is received, ends when it has been taken, is ordered in its stream. */
#define UCCH_LANE_MESSAGE_COMES 1
#define UCCH_LANE_MESSAGE_SYNC 2
#define UCCH_LANE_MESSAGE_ORDERED 4
#define UCCH_LANE_MESSAGE_BY_HOST 8
/* Bytes that a call moves at most for one kernel to do all of it, with several blocks. */
#define UCCH_FUSED_BYTES 786432

/* Network threads of a process at most that send, and that receive; and bytes that one sends in a piece: less costs
 * more than it gains, more keeps wires waiting for each other. */
#define UCCH_MOST_WIRES 16
#define UCCH_WIRE_RANGE 131072

/* Kinds of memory to a GPU runtime. */
#define UCCH_MEMORY_UNKNOWN 0
#define UCCH_MEMORY_PINNED 1
#define UCCH_MEMORY_DEVICE 2
#define UCCH_MEMORY_MANAGED 3
/* Bytes of the name by which a process borrows another's device memory. */
#define UCCH_LENT_BYTES 64
/* Traits of a GPU runtime, one bit each. EAGER: no kernel is loaded at its first launch, which would wait for the
 * device. WAITS_ANYWHERE: a stream may wait for any word, not only for the runtime's own. OWN_QUEUES: streams share no
 * queue, in which one that waits holds up those behind it. TELLS_CURRENT: a thread that has chosen no device has none,
 * not the first. */
#define UCCH_EAGER 1
#define UCCH_WAITS_ANYWHERE 8
#define UCCH_OWN_QUEUES 16
#define UCCH_TELLS_CURRENT 32
/* Mode of a thread that may do anything beside a capture, as graphs do not see it. */
#define UCCH_RELAXED 2

/* Statuses of our own, apart from both libraries' ranges. ALIASED: the send and the receive buffer are one; the
 * in-place program is wanted. LATER: it would have to wait for what only its caller can let go on. PINNED: no
 * pinned memory is left.
 * FAIL_LOST: libucp has thrown a message away. FAIL_STALE: a region is not there any more. FAIL_RANGE: a place outside
 * of one. FAIL_PATH: two processes have no memory that both see, and no network threads between them. FAIL_CONNECTION:
 * one of network threads has broken. */
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

/* Two addresses of the internet, and what is between them. */
#define UCCH_PATH_BYTES 96

/* One-sided communication: what a transfer does, AWAIT on this side alone, the others are counted by peer, and beside
 * it what failed, bytes, and notifications; counters of a process, entries of a list and bytes of a notification at
 * most. */
#define UCCH_RMA_PUT 0
#define UCCH_RMA_GET 1
#define UCCH_RMA_FLUSH 2
#define UCCH_RMA_OPEN 3
#define UCCH_RMA_AWAIT 7
#define UCCH_RMA_FAILED 4
#define UCCH_RMA_BYTES 5
#define UCCH_RMA_NOTICES 6
#define UCCH_RMA_COUNTS 7
/* Bits of a worker's number, behind the lowest, that are the number of its process. */
#define UCCH_RMA_PROCESS 4194303
#define UCCH_RMA_COUNTERS 1024
#define UCCH_RMA_ENTRIES 1048576
#define UCCH_RMA_NOTICE 65536
/* Bytes by which a peer borrows a region of device memory. */
#define UCCH_RMA_LENT 72
/* Bytes that the addresses of a process's wires take at most. */
#define UCCH_RMA_REACH 65536

/* Calls in graphs: the kernel was not loaded before the capture; two ran at a time. */
#define UCCH_FAIL_COLD -1018
#define UCCH_FAIL_OVERLAP -1019

/* Rings between two ranks in one direction: by the length of messages, and of those in graphs. */
#define UCCH_RINGS 9

/* How a peer is: there, ended well, dead; of another host's also without a sign of life, or its host is. UCCH_ALL_PEERS
 * asks for all of them: the best of their fates. */
#define UCCH_THERE 0
#define UCCH_LEFT 1
#define UCCH_DIED 2
#define UCCH_SILENT 3
#define UCCH_UNREACHABLE 4
#define UCCH_ALL_PEERS -1

/* Where a communicator's tags have the source's rank, and the bits of the package's own messages and of offers. */
#define UCCH_SOURCE_BIT 31
#define UCCH_OWN_BIT 49
#define UCCH_OFFER_BIT 50

#define UCCH_LABEL_BYTES 48
/* Bytes of the text of a refusal, and the signature of a call that is one. */
#define UCCH_REFUSAL_BYTES 240
#define UCCH_REFUSED_CALL 1380271700
/* The signature that is announced while a call is set up, to be made later: it fits any call but a refused one. */
#define UCCH_ANY_CALL 1380271702

/* Bytes that a rank brings to a call on the arrival board at most, and ranks of which each reads those of all others;
 * and whose it reads that are none. */
#define UCCH_PARCEL_BYTES 496
#define UCCH_PARCEL_RANKS 32
#define UCCH_NOBODY -2

/* A rank that comes to make a communicator of one that it has: it wants no more of their job, or goes on with it; and
 * what follows for all of them where there is no number. How many numbers it offers of what it could use again. */
#define UCCH_READY 1
#define UCCH_GOES_ON 2
#define UCCH_NOT_READY -3
#define UCCH_NO_MORE -2
#define UCCH_ASK -1
#define UCCH_SPARES 32

/* Bytes before the first event of a timeline, and before the first record of a flight recorder. */
#define UCCH_TRACE_HEADER 4096

/* Records of the flight recorder: a call run by the host, left to streams, put into a graph, run by MPI, or refused;
 * messages; one-sided transfers, UCCH_RMA_* further on. And why the records were written to a file. */
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
