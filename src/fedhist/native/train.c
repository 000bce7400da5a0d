/* Local training of a small convolutional net, all steps of one client in one call.
 *
 * Activations lie as [channel, row, column, example]: a vector register holds the same pixel of several examples.
 * Weights are then scalars, used where PyTorch's flat parameter vector has them, and convolutions of any size,
 * stride and padding are the same loop over registers. A linear layer is a convolution of 1×1 images; flattening
 * is nothing at all. Zero padding is a margin around the input that stays zero.
 *
 * Nothing is global and nothing allocated: threads that bring their own scratch memory do not meet.
 */
#include "descent.h"
#include "dropout.h"
#include "losses.h"

/* Where a convolution's patch elements and channels lie, as distances in vectors. */
static void measure(const Layer *layer, Image in, Image out, const Space *space) {
    int32_t *patch = space->patch;
    for (int channel = 0; channel < layer->channels; channel++)
        for (int y = 0; y < layer->kernel_height; y++)
            for (int x = 0; x < layer->kernel_width; x++)
                *patch++ = (int32_t)(channel * in.plane + y * in.row + x * space->vectors);
    for (int channel = 0; channel < layer->out_channels; channel++)
        space->plane[channel] = (int32_t)(channel * out.plane);
}

/* Bring examples into the lanes. Lanes left over repeat the first example; the loss leaves them out. */
static void gather(const Layer *layer, const float *x, const int64_t *index, int examples, const Space *space) {
    int stride = space->vectors * LANES;
    ptrdiff_t size = (ptrdiff_t)layer->channels * layer->height * layer->width;
    Image in = input_image(layer, space->vectors, space->values[0]);
    lanes *start = in.at + layer->pad_height * in.row + layer->pad_width * space->vectors;
    for (int channel = 0; channel < layer->channels; channel++)
        for (int y = 0; y < layer->height; y++) {
            float *target = (float *)(start + channel * in.plane + y * in.row);
            const float *source = x + (ptrdiff_t)(channel * layer->height + y) * layer->width;
            for (int lane = 0; lane < stride; lane++) {
                const float *row = source + index[lane < examples ? lane : 0] * size;
                for (int column = 0; column < layer->width; column++) target[column * stride + lane] = row[column];
            }
        }
}

/* Compute all activations. Each layer goes row by row, so that a row is used while it is in the cache. */
static void forward(const Net *net, const float *parameters, uint64_t key, const Space *space) {
    for (int64_t l = 0; l < net->num_layers; l++) {
        const Layer *layer = net->layers + l;
        const float *weight = parameters + layer->weight, *bias = layer->bias < 0 ? NULL : parameters + layer->bias;
        Image in = input_image(layer, space->vectors, space->values[l]);
        Image out = output_image(layer, l == net->num_layers - 1, space->vectors, space->values[l + 1]);
        if (layer->kind == CONVOLUTION) measure(layer, in, out, space);
        for (int y = 0; y < layer->out_height; y++) {
            if (layer->kind == CONVOLUTION) convolve(layer, y, false, weight, bias, in, out, space);
            else if (drops(layer)) drop(layer, y, key, in, out, space->vectors);
            else pool(layer, y, false, in, out, in, out, space->vectors);
            activate(layer, y, false, out, out, space->vectors);
        }
    }
}

/* Turn the gradient of the outputs, in slopes[0], into that of all parameters. */
static void backward(const Net *net, const float *parameters, uint64_t key, int examples, const Space *space) {
    for (int64_t l = net->num_layers - 1, turn = 0; l >= 0; l--, turn = !turn) {
        const Layer *layer = net->layers + l;
        bool last = l == net->num_layers - 1, convolution = layer->kind == CONVOLUTION && !is_linear(layer);
        int vectors = space->vectors, clean = 0;
        Image in = input_image(layer, vectors, space->values[l]);
        Image out = output_image(layer, last, vectors, space->values[l + 1]);
        Image out_slope = output_image(layer, last, vectors, space->slopes[turn]);
        Image in_slope = input_image(layer, vectors, space->slopes[!turn]);
        float *gradient = space->gradient;
        ptrdiff_t weights = (ptrdiff_t)patch_size(layer) * layer->out_channels;
        if (layer->kind == CONVOLUTION) measure(layer, in, out, space);
        if (convolution) memset(space->sums, 0, sizeof(lanes) * (size_t)weights);
        int biases = layer->bias < 0 ? 0 : layer->out_channels;
        if (biases) memset(gradient + layer->bias, 0, sizeof(float) * (size_t)biases);
        for (int y = 0; y < layer->out_height; y++) {
            activate(layer, y, true, out, out_slope, vectors);
            for (int channel = 0; channel < biases; channel++) {
                lanes sum = splat(0);
                for (int n = 0; n < layer->out_width * vectors; n++)
                    sum += out_slope.at[channel * out_slope.plane + y * out_slope.row + n];
                gradient[layer->bias + channel] += sum_of_lanes(sum);
            }
            if (convolution) convolution_gradient(layer, y, in, out_slope, space);
            if (l == 0) continue;
            /* The input's gradient adds up over windows. Its rows begin at zero just before the first one. */
            int wanted = y == layer->out_height - 1 ? layer->height + 2 * layer->pad_height
                                                    : y * layer->stride_height + layer->kernel_height;
            for (; clean < wanted; clean++)
                for (int channel = 0; channel < layer->channels; channel++)
                    memset(in_slope.at + channel * in_slope.plane + clean * in_slope.row, 0,
                           sizeof(lanes) * (size_t)in_slope.row);
            if (layer->kind == CONVOLUTION)
                convolve(layer, y, true, parameters + layer->weight, NULL, in_slope, out_slope, space);
            else if (drops(layer)) drop(layer, y, key, out_slope, in_slope, vectors);
            else pool(layer, y, true, in, out, in_slope, out_slope, vectors);
        }
        if (is_linear(layer)) linear_gradient(layer, in, out_slope, examples, space, gradient + layer->weight);
        for (ptrdiff_t i = 0; convolution && i < weights; i++)
            gradient[layer->weight + i] = sum_of_lanes(space->sums[i]);
    }
}

/* Start a batch of another size: margins must be zero, and nothing may be left in the lanes of old. */
static void prepare(const Net *net, int64_t examples, char *scratch, Space *space) {
    int64_t vectors = (examples + LANES - 1) / LANES;
    if (space->vectors == vectors) return;
    carve(net, vectors * LANES, (uintptr_t)scratch, space);
    memset(space->images, 0, space->image_bytes);
}

/* Return the bytes of scratch memory, aligned to 64, that batches of up to so many examples take. */
size_t fedhist_scratch(const Net *net, int64_t batch, int64_t adam) {
    return carve(net, (batch + LANES - 1) / LANES * LANES, 0, &(Space){.adam = adam != SGD});
}

/* Train from `received` on minibatches, whose sizes and examples are listed end to end, and write the upload.
 * `shift`, if any, is added to the gradient of every step. */
void fedhist_train(const Net *net, const Descent *descent, const float *x, const void *y, const int64_t *index,
                   const int64_t *sizes, int64_t steps, const float *received, const float *shift, float *upload,
                   char *scratch) {
    Space space = {.adam = descent->adam != SGD};
    size_t flat = sizeof(float) * (size_t)net->num_parameters;
    for (int64_t step = 0; step < steps; index += sizes[step++]) {
        int examples = (int)sizes[step];
        uint64_t key = step_key(descent->key, step);
        prepare(net, examples, scratch, &space);
        if (step == 0) {
            memcpy(space.local, received, flat);
            memset(space.gradient, 0, flat);
            memset(space.velocity, 0, flat);
            if (space.adam) memset(space.squares, 0, flat);
        }
        gather(net->layers, x, index, examples, &space);
        forward(net, space.local, key, &space);
        differentiate(net, y, index, examples, &space);
        backward(net, space.local, key, examples, &space);
        descend(net->num_parameters, descent, step, received, shift, &space);
    }
    for (int64_t i = 0; i < net->num_parameters; i++) upload[i] = received[i] - space.local[i];
}

/* Write a model's outputs for some examples, one row for each. */
void fedhist_outputs(const Net *net, const float *parameters, const float *x, const int64_t *index, int64_t count,
                     int64_t batch, float *outputs, char *scratch) {
    Space space = {0};
    int width = net->layers[net->num_layers - 1].out_channels;
    for (int64_t at = 0; at < count; at += batch) {
        int examples = (int)(count - at < batch ? count - at : batch);
        prepare(net, examples, scratch, &space);
        gather(net->layers, x, index + at, examples, &space);
        forward(net, parameters, 0, &space);
        const float *output = (const float *)space.values[net->num_layers];
        for (int e = 0; e < examples; e++)
            for (int c = 0; c < width; c++) *outputs++ = output[c * space.vectors * LANES + e];
    }
}
