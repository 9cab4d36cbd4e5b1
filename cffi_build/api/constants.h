/* Constants that C and Python share. Plain `#define NAME number` lines only: cffi reads this file too. */

/* Buffers whose address a span counts from. */
#define UCCH_SEND 0
#define UCCH_RECV 1
#define UCCH_TMP 2

/* Local steps. */
#define UCCH_COPY 0
#define UCCH_COMBINE 1
#define UCCH_CAST 2
#define UCCH_SCALE 3

/* Further kernels: wait for a word, write one, all of a short call, and one side of a message. */
#define UCCH_AWAIT 4
#define UCCH_POST 5
#define UCCH_FUSED 6
#define UCCH_STREAM_COPY 7
/* Bytes that a call moves at most for one kernel to do all of it, with several blocks. */
#define UCCH_FUSED_BYTES 786432

/* Network threads of a process at most that send, and that receive. */
#define UCCH_MOST_WIRES 16

/* Kinds of memory to a GPU runtime. */
#define UCCH_MEMORY_UNKNOWN 0
#define UCCH_MEMORY_PINNED 1
#define UCCH_MEMORY_DEVICE 2
#define UCCH_MEMORY_MANAGED 3
/* Traits of a GPU runtime, one bit each. EAGER: no kernel is loaded at its first launch, which would wait for the
 * device. FINE: memory for others is coherent on every link. PARKS: a stream that waits for a word keeps no part of the
 * device busy. WAITS_ANYWHERE: it may be any word, not one of the runtime's own. OWN_QUEUES: streams share no queue, in
 * which one that waits holds up those behind it. TELLS_CURRENT: a thread that has chosen no device has none, not the
 * first. PEERS_BY_NUMBER: memory of another process's device is opened by that device's number here. */
#define UCCH_EAGER 1
#define UCCH_FINE 2
#define UCCH_PARKS 4
#define UCCH_WAITS_ANYWHERE 8
#define UCCH_OWN_QUEUES 16
#define UCCH_TELLS_CURRENT 32
#define UCCH_PEERS_BY_NUMBER 64
/* Bytes of what a process gives to others that are to open its device memory. */
#define UCCH_SHARE_BYTES 64

/* Statuses of our own, apart from both libraries' ranges. ALIASED: the send and the receive buffer are one; the
 * in-place program is wanted. LATER: it would have to wait for what only its caller can let go on. STALE:
 * an earlier call came to nothing, of which the caller is to take note first. PINNED: no pinned memory is left. */
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
#define UCCH_STALE -1014
#define UCCH_FAIL_PINNED -1015

/* Rings between two ranks in one direction, by the length of messages, and pieces that lie in one at a time. */
#define UCCH_RINGS 3
#define UCCH_RING_SLOTS 8

/* How a peer is: there, ended well, dead. UCCH_ALL_PEERS asks for all of them: the best of their fates. */
#define UCCH_THERE 0
#define UCCH_LEFT 1
#define UCCH_DIED 2
#define UCCH_ALL_PEERS -1

/* Where a communicator's tags have the source's rank, and the bit of a rendezvous header. */
#define UCCH_SOURCE_BIT 31
#define UCCH_RTS_BIT 50

#define UCCH_LABEL_BYTES 48
/* Bytes of the text of a refusal. */
#define UCCH_REFUSAL_BYTES 232

/* Bytes before the first event of a timeline. */
#define UCCH_TRACE_HEADER 4096
