#pragma once
#include "vector.h"

#define PANEL 16
#define PARTS (PANEL / LANES)
#define GROUP 32

enum { F32, BF16, Q4_1, Q8_0 };

typedef struct {
    const uint8_t *packed;
    const float *bias;  // padded to whole panels, or NULL
    int64_t panel_bytes;
    int64_t group_bytes;
    int32_t format;
    int32_t outputs;
    int32_t inputs;
} Matrix;

// amx.c: whether the tile unit is there and the kernel lets this process use it.
int tm_amx_permitted(void);
void tm_linear_amx(const Matrix *w, const float *x, int rows, float *y, int threads);
