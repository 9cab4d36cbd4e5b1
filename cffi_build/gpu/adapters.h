/* The vendors' adapters that the engine brings: each is `ucch_NAME` of its file. */
ADAPTER(cuda)
ADAPTER(hip)
