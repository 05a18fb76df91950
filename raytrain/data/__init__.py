"""Images, from where they lie to a batch on the device.

Which exist (`source`: `digits`, `folder`, `shards`, `parquet`, `webdataset`, over `storage`), how other forms become
shards (`origin`, `transcode`, `convert`, `cache`), in what order they come (`order`), how a file becomes pixels
(`decode`), what is done to them (`augment`, `autoaugment`, `mix`), the threads that do it beside the step (`fill`,
`loader`), and what could not be decoded (`bad`).
"""
