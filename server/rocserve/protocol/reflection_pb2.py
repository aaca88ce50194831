"""Made from reflection.proto by protos/generate.py; do not edit."""

from rocserve.protocol import pool as _pool

DESCRIPTOR = _pool.add_file(
    b'\n\x10reflection.proto\x12\x12grpc'
    b'.reflection.v1"\xf3\x02\n\x17Serve'
    b'rReflectionRequest\x12\x12\n\x04ho'
    b'st\x18\x01 \x01(\tR\x04host\x12*\n\x10file_b'
    b'y_filename\x18\x03 \x01(\tH\x00R\x0efile'
    b'ByFilename\x126\n\x16file_conta'
    b'ining_symbol\x18\x04 \x01(\tH\x00R\x14fi'
    b'leContainingSymbol\x12b\n\x19fi'
    b'le_containing_extension\x18'
    b'\x05 \x01(\x0b2$.grpc.reflection.'
    b'v1.ExtensionRequestH\x00R\x17f'
    b'ileContainingExtension\x12B'
    b'\n\x1dall_extension_numbers_'
    b'of_type\x18\x06 \x01(\tH\x00R\x19allExte'
    b'nsionNumbersOfType\x12%\n\rli'
    b'st_services\x18\x07 \x01(\tH\x00R\x0clis'
    b'tServicesB\x11\n\x0fmessage_req'
    b'uest"f\n\x10ExtensionRequest'
    b"\x12'\n\x0fcontaining_type\x18\x01 \x01("
    b'\tR\x0econtainingType\x12)\n\x10ext'
    b'ension_number\x18\x02 \x01(\x05R\x0fext'
    b'ensionNumber"\xae\x04\n\x18ServerR'
    b'eflectionResponse\x12\x1d\n\nval'
    b'id_host\x18\x01 \x01(\tR\tvalidHost'
    b'\x12V\n\x10original_request\x18\x02 \x01'
    b'(\x0b2+.grpc.reflection.v1.'
    b'ServerReflectionRequestR'
    b'\x0foriginalRequest\x12f\n\x18file'
    b'_descriptor_response\x18\x04 \x01'
    b'(\x0b2*.grpc.reflection.v1.'
    b'FileDescriptorResponseH\x00'
    b'R\x16fileDescriptorResponse'
    b'\x12r\n\x1eall_extension_number'
    b's_response\x18\x05 \x01(\x0b2+.grpc.'
    b'reflection.v1.ExtensionN'
    b'umberResponseH\x00R\x1ballExte'
    b'nsionNumbersResponse\x12_\n\x16'
    b'list_services_response\x18\x06'
    b" \x01(\x0b2'.grpc.reflection.v"
    b'1.ListServiceResponseH\x00R'
    b'\x14listServicesResponse\x12J\n'
    b'\x0eerror_response\x18\x07 \x01(\x0b2!.'
    b'grpc.reflection.v1.Error'
    b'ResponseH\x00R\rerrorRespons'
    b'eB\x12\n\x10message_response"L\n'
    b'\x16FileDescriptorResponse\x12'
    b'2\n\x15file_descriptor_proto'
    b'\x18\x01 \x03(\x0cR\x13fileDescriptorPr'
    b'oto"j\n\x17ExtensionNumberRe'
    b'sponse\x12$\n\x0ebase_type_name'
    b'\x18\x01 \x01(\tR\x0cbaseTypeName\x12)\n\x10'
    b'extension_number\x18\x02 \x03(\x05R\x0f'
    b'extensionNumber"T\n\x13ListS'
    b'erviceResponse\x12=\n\x07servic'
    b'e\x18\x01 \x03(\x0b2#.grpc.reflectio'
    b'n.v1.ServiceResponseR\x07se'
    b'rvice"%\n\x0fServiceResponse'
    b'\x12\x12\n\x04name\x18\x01 \x01(\tR\x04name"S\n\r'
    b'ErrorResponse\x12\x1d\n\nerror_c'
    b'ode\x18\x01 \x01(\x05R\terrorCode\x12#\n\r'
    b'error_message\x18\x02 \x01(\tR\x0cerr'
    b'orMessage2\x89\x01\n\x10ServerRefl'
    b'ection\x12u\n\x14ServerReflecti'
    b'onInfo\x12+.grpc.reflection'
    b'.v1.ServerReflectionRequ'
    b'est\x1a,.grpc.reflection.v1'
    b'.ServerReflectionRespons'
    b'e(\x010\x01b\x06proto3'
)

ServerReflectionRequest = _pool.message_class(DESCRIPTOR, "ServerReflectionRequest")
ExtensionRequest = _pool.message_class(DESCRIPTOR, "ExtensionRequest")
ServerReflectionResponse = _pool.message_class(DESCRIPTOR, "ServerReflectionResponse")
FileDescriptorResponse = _pool.message_class(DESCRIPTOR, "FileDescriptorResponse")
ExtensionNumberResponse = _pool.message_class(DESCRIPTOR, "ExtensionNumberResponse")
ListServiceResponse = _pool.message_class(DESCRIPTOR, "ListServiceResponse")
ServiceResponse = _pool.message_class(DESCRIPTOR, "ServiceResponse")
ErrorResponse = _pool.message_class(DESCRIPTOR, "ErrorResponse")
