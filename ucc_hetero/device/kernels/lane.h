/* Division of a long message in a lane into pieces; equal on both sides. */
#pragma once

#define UCCH_LANE_LEAST 262144
#define UCCH_LANE_QUARTER(bytes) (((bytes) / 4 + 4095) / 4096 * 4096)
#define UCCH_LANE_FOURTH(bytes)                                                                                        \
    (UCCH_LANE_QUARTER(bytes) < UCCH_LANE_LEAST ? UCCH_LANE_LEAST : UCCH_LANE_QUARTER(bytes))
/* Bytes of each piece except the last, for a message and slots of these lengths. */
#define UCCH_LANE_PIECE(bytes, slot) (UCCH_LANE_FOURTH(bytes) < (slot) ? UCCH_LANE_FOURTH(bytes) : (slot))
