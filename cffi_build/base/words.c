/* What the ranks of a communicator exchange before they make new communicators of some of them, and what each rank
 * derives from it: the same result on every rank. */
#include "base/base.h"

/* The number of the new communicator, above all numbers that these ranks have claimed; or UCCH_NOT_READY if a rank
 * is not ready, UCCH_NO_MORE if a rank can no longer use their job (its contexts), UCCH_ASK if the number may be in
 * use. */
int64_t ucch_words_claim(const ucch_words *all, int n) {
    int64_t last = -1, next_used = INT64_MAX, least = UCCH_GOES_ON;
    for (int i = 0; i < n; i++) {
        if (all[i].ready < least) least = all[i].ready;
        if (all[i].last > last) last = all[i].last;
        if (all[i].next_used < next_used) next_used = all[i].next_used;
    }
    if (least != UCCH_GOES_ON) return least == UCCH_READY ? UCCH_NO_MORE : UCCH_NOT_READY;
    return last + 1 < next_used ? last + 1 : UCCH_ASK;
}

/* Ranks with the color of rank `mine`, ordered by key. Returns how many. */
int ucch_words_ranks(const ucch_words *all, int n, int mine, int *ranks) {
    int count = 0;
    for (int i = 0; i < n; i++) {
        if (all[i].color != all[mine].color) continue;
        int at = count++;
        for (; at && all[ranks[at - 1]].key > all[i].key; at--)
            ranks[at] = ranks[at - 1];
        ranks[at] = i;
    }
    return count;
}

static int offers(const ucch_words *words, int64_t number) {
    for (int i = 0; i < words->spares; i++)
        if (words->spare[i] == number) return 1;
    return 0;
}

/* Numbers of spare communicators that all of these ranks offer, in the same order on every rank. Returns how many. */
int ucch_words_spare(const ucch_words *all, const int *ranks, int n, int64_t *common) {
    const ucch_words *first = &all[ranks[0]];
    int count = 0;
    for (int i = 0; i < first->spares; i++) {
        int with = 1;
        while (with < n && offers(&all[ranks[with]], first->spare[i]))
            with++;
        if (with == n) common[count++] = first->spare[i];
    }
    return count;
}
