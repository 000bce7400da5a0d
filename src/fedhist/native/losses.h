/* Gradients of losses with respect to a net's outputs. */
#pragma once
#include "layers.h"

/* Cross-entropy with the number of a class. */
static void cross_entropy(const float *output, int classes, int stride, int64_t label, int examples, float *slope) {
    float most = output[0], sum = 0;
    for (int c = 1; c < classes; c++)
        if (output[c * stride] > most) most = output[c * stride];
    for (int c = 0; c < classes; c++) sum += expf(output[c * stride] - most);
    for (int c = 0; c < classes; c++)
        slope[c * stride] = (expf(output[c * stride] - most) / sum - (c == label)) / (float)examples;
}

/* A loss of each output and its target, of which the mean over outputs is taken. */
static float slope_of(int64_t loss, float output, float target) {
    float error = output - target;
    if (loss == SQUARED_ERROR) return 2 * error;
    if (loss == BINARY_CROSS_ENTROPY) return 1 / (1 + expf(-output)) - target;
    return error < -1 ? -1 : error > 1 ? 1 : error;
}

/* Write the gradient of a batch's mean loss into the outputs' slot; it is zero in the lanes left over. */
static void differentiate(const Net *net, const void *y, const int64_t *index, int examples, const Space *space) {
    int outputs = net->layers[net->num_layers - 1].out_channels, stride = space->vectors * LANES;
    const float *output = (const float *)space->values[net->num_layers];
    float *slope = (float *)slope_at(net, net->num_layers, space), count = (float)examples * (float)outputs;
    memset(slope, 0, sizeof(float) * (size_t)(outputs * stride));
    for (int lane = 0; lane < examples; lane++, output++, slope++)
        if (net->loss == CROSS_ENTROPY)
            cross_entropy(output, outputs, stride, ((const int64_t *)y)[index[lane]], examples, slope);
        else {
            const float *target = (const float *)y + index[lane] * outputs;
            for (int c = 0; c < outputs; c++)
                slope[c * stride] = slope_of(net->loss, output[c * stride], target[c]) / count;
        }
}
