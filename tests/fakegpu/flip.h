/* Flips a bit in transferred data: bit FLIP_BIT of the eight bytes FLIP (hexadecimal) that rank FLIP_RANK receives,
 * once for each FLIP. Included by code that transfers data. */
static void flip(void *data, ssize_t bytes) {
    static unsigned long long done;
    const char *magic = getenv("FLIP"), *wanted = getenv("FLIP_RANK"), *rank = getenv("OMPI_COMM_WORLD_RANK");
    const char *bit = getenv("FLIP_BIT");
    if (!rank) rank = getenv("PMI_RANK");
    if (bytes < 8 || !magic || !wanted || !rank || !bit || strcmp(wanted, rank)) return;
    unsigned long long number = strtoull(magic, NULL, 16);
    if (number == done) return;
    char *at = memmem(data, (size_t)bytes, &number, sizeof(number));
    if (!at) return;
    done = number;
    at[atoi(bit) / 8] ^= (char)(1 << atoi(bit) % 8);
    fprintf(stderr, "flipped on rank %s\n", rank);
}
