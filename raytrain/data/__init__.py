"""Images, from where they lie to a batch on the device.

Which exist (`source`), in what order (`order`), how a file becomes pixels (`decode`), what is done to them
(`augment`), and the threads that do it beside the step (`loader`).
"""
